//! [`BlockSelector`]: the interface of a sparse method.

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

    /// Selects keys for one causal call. Layouts and conventions are those of [`candle_s2o::Attention::prefill`], query
    /// blocks those of [`candle_s2o::query_blocks`], cut at multiples of 128 of the absolute position.
    ///
    /// # Errors
    /// If the method does not support the shapes or devices.
    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError>;
}

/// The keys that a method selected.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The keys, in the form that an executor takes.
    pub keys: Keys,
    /// If present, the block numbers refer to these reordered keys and values.
    pub reordered: Option<Reordered>,
}

/// Reordered keys and values: `before` tokens (a multiple of 128) in the method's own order, then the call's own keys
/// unchanged. The executor treats the first `before` tokens as earlier than all queries, so a method that lists only
/// those of their blocks that a query block sees in full stays causal.
#[derive(Debug, Clone)]
pub struct Reordered {
    /// `(batch, before + k_len, heads, head_dim)`, with an order for each KV head or each query head.
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

/// One attention call to tune on, as [`candle_s2o::Attention::prefill`] gets it.
#[derive(Debug, Clone)]
pub struct TuningCall {
    /// The call.
    pub call: PrefillCall,
    /// `(batch, q_len, num_heads, head_dim)`.
    pub q: Tensor,
    /// `(batch, k_len, num_kv_heads, head_dim)`.
    pub k: Tensor,
    /// As `k`.
    pub v: Tensor,
}
