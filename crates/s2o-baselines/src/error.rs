//! [`BaselineError`]: why a method could not be set up or could not select.

use std::path::PathBuf;

use candle_s2o::{AttnError, BlockError, ShapeError};
use thiserror::Error;

/// Why a method could not be set up or could not select.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// An option is out of its range.
    #[error("{method}: {option}: expected {expected}, got {got}")]
    Option {
        /// Name of the method.
        method: &'static str,
        /// The option.
        option: &'static str,
        /// Its range.
        expected: &'static str,
        /// The refused value.
        got: String,
    },
    /// A configuration is for another number of heads.
    #[error("{method}: layer {layer}: expected settings of {expected} heads, got {got}")]
    HeadCount {
        /// Name of the method.
        method: &'static str,
        /// The layer.
        layer: usize,
        /// Query heads of the call.
        expected: usize,
        /// Heads in the configuration.
        got: usize,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file holds no configuration of the method.
    #[error("{}: expected {expected}, got {got}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The parser's error.
        got: String,
    },
    /// The sizes of the tensors do not fit each other.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A selection does not fit its call.
    #[error(transparent)]
    Blocks(#[from] BlockError),
    /// The executor refused the call.
    #[error(transparent)]
    Attn(#[from] AttnError),
    /// A GPU refused a selection or failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(s2o_cuda::CudaError),
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

#[cfg(feature = "cuda")]
impl From<s2o_cuda::CudaError> for BaselineError {
    fn from(error: s2o_cuda::CudaError) -> Self {
        match error {
            s2o_cuda::CudaError::Candle(error) => Self::Candle(error),
            other => Self::Cuda(other),
        }
    }
}

impl BaselineError {
    pub(crate) fn option(
        method: &'static str,
        option: &'static str,
        expected: &'static str,
        got: impl ToString,
    ) -> Self {
        Self::Option { method, option, expected, got: got.to_string() }
    }
}

/// Returns `threshold` if it is a share of the scores' sum that a choice can reach: above 0, up to 1.
pub(crate) fn checked_threshold(method: &'static str, threshold: f64) -> Result<f64, BaselineError> {
    if threshold > 0.0 && threshold <= 1.0 {
        Ok(threshold)
    } else {
        Err(BaselineError::option(method, "threshold", "a share above 0 up to 1", threshold))
    }
}

impl From<BaselineError> for candle_core::Error {
    fn from(error: BaselineError) -> Self {
        match error {
            BaselineError::Candle(error) => error,
            BaselineError::Attn(error) => error.into(),
            other => Self::wrap(other),
        }
    }
}
