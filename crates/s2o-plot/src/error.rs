//! [`PlotError`]: why a picture was not made.

use std::path::PathBuf;

use thiserror::Error;

/// Why a picture was not made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The data, the size or the name of a picture are not what they have to be.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The part of the picture.
        what: &'static str,
        /// What it has to be.
        expected: String,
        /// What it is.
        got: String,
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
    /// A file or directory cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The pixels cannot be made into a PNG.
    #[error("cannot encode the picture: {reason}")]
    Encode {
        /// What the encoder says.
        reason: String,
    },
}

impl PlotError {
    pub(crate) fn wrong(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::WrongInput { what, expected: expected.to_string(), got: got.to_string() }
    }
}
