//! Sizes and norms of the heads of a layer.

use candle_core::Tensor;

/// Heads of a layer's queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub num_heads: usize,
    /// Key / value heads.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
}

/// RMS norms of every query and key head, before the rotation (Qwen3).
#[derive(Debug, Clone, Copy)]
pub struct QkNorm<'a> {
    /// Weight of the query norm, `(head_dim)`.
    pub q: &'a Tensor,
    /// Weight of the key norm, `(head_dim)`.
    pub k: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
}
