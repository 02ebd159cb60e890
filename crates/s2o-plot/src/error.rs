//! [`PlotError`].

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A reason why a picture cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The data, the size or the name of a picture is invalid, or labels and margins leave no room for the data.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The invalid input.
        what: &'static str,
        /// The valid values.
        expected: String,
        /// The value.
        got: String,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The reason of the operating system or of the encoder.
        source: io::Error,
    },
}

impl PlotError {
    pub(crate) fn wrong(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::WrongInput { what, expected: expected.to_string(), got: got.to_string() }
    }
}
