//! Exact attention with Candle's own ops, in f32 on every device: the reference for other methods.

use candle_core::{DType, Device, Result, Tensor};
use candle_s2o::{Attention, PrefillCall};

use super::Method;

/// Number of scores in memory at a time.
const SCORES: usize = 1 << 26;

/// Attention as defined, with matmul and softmax. It is always dense and reports no work.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sdpa;

impl Sdpa {
    /// Causal attention in f32, whatever the dtype of the tensors.
    ///
    /// # Errors
    /// If the tensors do not fit each other.
    pub fn in_f32(call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (batch, q_len, num_heads, head_dim) = q.dims4()?;
        let (_, k_len, num_kv_heads, _) = k.dims4()?;
        let group_size = num_heads / num_kv_heads;
        let heads_first = |t: &Tensor| t.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
        let (keys, values) = (heads_first(k)?, heads_first(v)?);
        let rows_at_a_time = (SCORES / (batch * num_heads * k_len)).max(1);
        let mut parts = Vec::new();
        for start in (0..q_len).step_by(rows_at_a_time) {
            let rows = rows_at_a_time.min(q_len - start);
            let first = k_len - q_len + start;
            let visible = first + rows;
            // The query heads of a group are rows of one matrix, so no KV head is repeated.
            let queries = heads_first(&q.narrow(1, start, rows)?)?;
            let queries = queries.reshape((batch, num_kv_heads, group_size * rows, head_dim))?;
            let scores = queries.matmul(&keys.narrow(2, 0, visible)?.t()?.contiguous()?)?;
            let scores = (scores * f64::from(call.softmax_scale))?;
            let scores = scores.reshape((batch, num_heads, rows, visible))?;
            let scores = scores.broadcast_add(&causal_mask(first, rows, visible, q.device())?)?;
            let weights = candle_nn::ops::softmax_last_dim(&scores)?;
            let weights = weights.reshape((batch, num_kv_heads, group_size * rows, visible))?;
            let out = weights.matmul(&values.narrow(2, 0, visible)?.contiguous()?)?;
            parts.push(out.reshape((batch, num_heads, rows, head_dim))?.transpose(1, 2)?.contiguous()?);
        }
        Tensor::cat(&parts, 1)
    }
}

impl Attention for Sdpa {
    fn name(&self) -> &str {
        "sdpa-dense"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Self::in_f32(call, q, k, v)?.to_dtype(q.dtype())
    }
}

impl Method for Sdpa {}

/// `(rows, visible)`: 0 for the keys up to a query's own position, minus infinity for later keys. `first` is the
/// position of the first query.
fn causal_mask(first: usize, rows: usize, visible: usize, device: &Device) -> Result<Tensor> {
    let positions = Tensor::arange(first as u32, (first + rows) as u32, device)?.unsqueeze(1)?;
    let keys = Tensor::arange(0u32, visible as u32, device)?.unsqueeze(0)?;
    let hidden = keys.broadcast_gt(&positions)?;
    let shape = hidden.shape();
    let (beyond, upto) = (Tensor::new(f32::NEG_INFINITY, device)?, Tensor::new(0f32, device)?);
    hidden.where_cond(&beyond.broadcast_as(shape)?, &upto.broadcast_as(shape)?)
}
