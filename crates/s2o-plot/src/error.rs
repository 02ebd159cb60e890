//! [`PlotError`]: reasons why a picture cannot be made.

use std::path::PathBuf;

use thiserror::Error;

/// A reason why a picture cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The data, the size or the name of a picture is invalid.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The invalid input.
        what: &'static str,
        /// The valid values.
        expected: String,
        /// The value.
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
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The pixels cannot be encoded as PNG.
    #[error("cannot encode the picture: {reason}")]
    Encode {
        /// The encoder's message.
        reason: String,
    },
}

impl PlotError {
    pub(crate) fn wrong(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::WrongInput { what, expected: expected.to_string(), got: got.to_string() }
    }
}
