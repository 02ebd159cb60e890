//! [`BlockSelector`]: what a sparse method has to say.

use std::fmt::Debug;
use std::path::PathBuf;

use candle_core::Tensor;
use candle_s2o::{AttnError, BlockError, BlockSelection, PrefillCall, ShapeError};
use thiserror::Error;

use crate::mask::BlockMask;

/// Why a method could not be set up or could not select.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// An option is out of its range.
    #[error("{method}: {option}: expected {expected}, got {got}")]
    Option {
        /// Name of the method.
        method: &'static str,
        /// Which option.
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
        /// Which layer.
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
        /// What it should hold.
        expected: &'static str,
        /// What is wrong with it.
        got: String,
    },
    /// The sizes of the tensors do not fit each other.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A selection does not fit its call.
    #[error(transparent)]
    Blocks(#[from] BlockError),
    /// The executor refused.
    #[error(transparent)]
    Attn(#[from] AttnError),
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
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

/// The share of the scores' sum that a choice must reach, if it is one.
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

/// Picks the keys that each query block attends to.
///
/// Implementations are shared by all layers of a model and may be called from several threads.
pub trait BlockSelector: Debug + Send + Sync {
    /// Short stable name, as printed in tables.
    fn name(&self) -> &str;

    /// Selects for one causal call: layouts and conventions are those of [`candle_s2o::Attention::prefill`], query
    /// blocks those of [`candle_s2o::query_blocks`], cut at multiples of 128 of the absolute position.
    ///
    /// # Errors
    /// On shapes or devices that the method does not support.
    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError>;
}

/// What a method selected.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The keys, as an executor takes them.
    pub keys: Keys,
    /// Keys and values in an order of the method's own, to which the block numbers refer then.
    pub reordered: Option<Reordered>,
}

/// Keys and values laid out anew: `before` tokens in an order of the method's, a multiple of 128, and after them the
/// call's own keys as they are. To queries of the call all of the former lie in the past, so a method that lists only
/// blocks there whose keys a query block sees in full stays causal.
#[derive(Debug, Clone)]
pub struct Reordered {
    /// `(batch, before + k_len, heads, head_dim)`, for as many heads as the order has: KV heads or query heads.
    pub k: Tensor,
    /// As `k`.
    pub v: Tensor,
}

/// The keys that each query block attends to, in the form in which the executor of their device wants them.
#[derive(Debug, Clone)]
pub enum Keys {
    /// On the host: [`candle_s2o::block_sparse_attn`].
    Lists(BlockSelection),
    /// Where the tensors are: [`candle_s2o::block_mask_attn`].
    Mask(BlockMask),
}

impl Keys {
    /// The lists; those of a mask are read back from its device.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn lists(&self) -> Result<BlockSelection, BaselineError> {
        match self {
            Self::Lists(lists) => Ok(lists.clone()),
            Self::Mask(mask) => Ok(mask.lists()?.into()),
        }
    }
}

impl From<BlockSelection> for Selection {
    fn from(lists: BlockSelection) -> Self {
        Self { keys: Keys::Lists(lists), reordered: None }
    }
}

impl From<Keys> for Selection {
    fn from(keys: Keys) -> Self {
        Self { keys, reordered: None }
    }
}
