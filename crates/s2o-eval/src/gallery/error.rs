//! [`GalleryError`]: why a page was not made, or is not what its rows make.

use std::path::PathBuf;

use thiserror::Error;

use crate::error::EvalError;
use crate::plot::PlotError;

/// Why a page was not made, or is not what its rows make.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GalleryError {
    /// A line of the page, or of a file of rows, is not what it should be.
    #[error("{}, line {line}: expected {expected}, got {got}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What should stand there.
        expected: String,
        /// What stands there.
        got: String,
    },
    /// A file or directory has not what an entry is made of.
    #[error("{}: expected {expected}, got {got}", path.display())]
    Missing {
        /// The file or directory.
        path: PathBuf,
        /// What the entry is made of.
        expected: String,
        /// What is there.
        got: String,
    },
    /// An entry of the page cannot be made.
    #[error("{}, line {line}: {name}", page.display())]
    Entry {
        /// The page.
        page: PathBuf,
        /// The line of the marker, counted from 1.
        line: u64,
        /// What the marker names.
        name: String,
        /// Why.
        source: Box<GalleryError>,
    },
    /// A page that was to be checked differs from what its rows make.
    #[error("expected what `evaluate gallery` makes, got something else in {}", stale.join("; "))]
    OutOfDate {
        /// Entries of the page, by their line, and pictures.
        stale: Vec<String>,
    },
    /// A file cannot be read or written, or outcomes are malformed.
    #[error(transparent)]
    Data(#[from] EvalError),
    /// A picture cannot be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

/// `Result` with [`GalleryError`].
pub type Result<T, E = GalleryError> = std::result::Result<T, E>;
