//! The seam between models and attention methods: a model calls [`Attention::prefill`] and names no method.

use std::fmt::Debug;

use candle_core::{Result, Tensor};

/// What a model tells an attention method about one call, beside the tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillCall {
    /// Decoder layer, counted from 0.
    pub layer: usize,
    /// Factor on `q . k` before the softmax, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
    /// Tokens in the whole prompt, those in the cache before it included; the call whose keys reach it is the prompt's
    /// last chunk. S2O's segment length and dense tail go by it, so that chunks are cut as the whole would be.
    pub prompt_len: usize,
}

/// Causal prefill attention as a plug.
///
/// Implementations are shared by all layers of a model and may be called from several threads.
pub trait Attention: Debug + Send + Sync {
    /// Short stable name, as printed in tables (`dense`, `s2o`).
    fn name(&self) -> &str;

    /// Causal attention of a prompt chunk, after rotary embedding.
    ///
    /// `q` is `(batch, q_len, num_heads, head_dim)`; `k` and `v` are `(batch, k_len, num_kv_heads, head_dim)` and hold
    /// the whole cache, this chunk included. Returns `(batch, q_len, num_heads, head_dim)`. Queries are the LAST
    /// `q_len` positions of the `k_len` keys (bottom-right causal, as in FlashAttention 2.1 and later). `num_heads` is
    /// a multiple of `num_kv_heads`; query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    ///
    /// # Errors
    /// On shapes, dtypes or devices that the method does not support.
    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;
}
