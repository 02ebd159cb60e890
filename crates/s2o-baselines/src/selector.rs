//! [`BlockSelector`]: what a sparse method has to say.

use std::fmt::Debug;

use candle_core::Tensor;
use candle_s2o::{BlockSelection, PrefillCall};

use crate::error::BaselineError;
use crate::mask::Keys;

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
