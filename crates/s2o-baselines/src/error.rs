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
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
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
    /// Refuses an option of `method` unless `fits`.
    pub(crate) fn unless(
        fits: bool,
        method: &'static str,
        [option, expected]: [&'static str; 2],
        got: impl ToString,
    ) -> Result<(), Self> {
        if fits { Ok(()) } else { Err(Self::Option { method, option, expected, got: got.to_string() }) }
    }

    /// Refuses settings of `got` heads for a layer of `expected` heads.
    pub(crate) fn unless_equal_heads(
        method: &'static str,
        layer: usize,
        expected: usize,
        got: usize,
    ) -> Result<(), Self> {
        if got == expected { Ok(()) } else { Err(Self::HeadCount { method, layer, expected, got }) }
    }
}

/// Returns `threshold` if it is a share of the scores' sum that a choice can reach: above 0, up to 1.
pub(crate) fn checked_threshold(method: &'static str, threshold: f64) -> Result<f64, BaselineError> {
    let fits = threshold > 0.0 && threshold <= 1.0;
    BaselineError::unless(fits, method, ["threshold", "a share above 0 up to 1"], threshold)?;
    Ok(threshold)
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
