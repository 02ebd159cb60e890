//! [`PlotError`]: why a picture was not made.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

/// Why a picture was not made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The picture is too small or too large in one direction.
    #[error("picture: expected {expected:?} pixels a side, got {} x {}", got.0, got.1)]
    Size {
        /// Pixels that a side may have.
        expected: RangeInclusive<u32>,
        /// Width and height.
        got: (u32, u32),
    },
    /// Labels and margins leave no room for the data.
    #[error("picture: expected at least {expected:.0} pixels of {direction} for the data, got {got:.0}")]
    NoRoom {
        /// `width` or `height`.
        direction: &'static str,
        /// Pixels that the data need.
        expected: f64,
        /// Pixels that are left.
        got: f64,
    },
    /// There is nothing to draw.
    #[error("{what}: expected {expected}, got none among {got}")]
    NoData {
        /// The part of the plot.
        what: &'static str,
        /// What would have been drawn.
        expected: &'static str,
        /// How many values there were.
        got: usize,
    },
    /// Parts of the data do not fit each other.
    #[error("{what}: expected {expected}, got {got}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many there must be.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// A number is outside what the plot can show.
    #[error("{what}: expected {expected}, got {got}")]
    Value {
        /// The part of the plot.
        what: &'static str,
        /// What can be shown.
        expected: &'static str,
        /// The number.
        got: f64,
    },
    /// A name would not be a file in the directory.
    #[error("picture name: expected a file name without its extension, got {got:?}")]
    Name {
        /// The name.
        got: String,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The drawing library refused.
    #[error("cannot draw: {reason}")]
    Draw {
        /// Its words.
        reason: String,
    },
}
