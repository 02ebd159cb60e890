//! Blocks of queries and keys stood for by their means, as several methods score them.

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, query_blocks};

use crate::mask::causal_blocks;
use crate::selector::BaselineError;

/// Means over blocks of `block` tokens, cut at multiples of the absolute position: `x` `(batch, len, heads, head_dim)`,
/// its first token at position `offset`, becomes `(batch, heads, blocks, head_dim)` of f32. Ragged blocks are means of
/// the tokens that they have.
///
/// # Errors
/// If Candle fails.
pub fn block_means(x: &Tensor, offset: usize, block: usize) -> Result<Tensor, BaselineError> {
    let (_, len, _, _) = x.dims4()?;
    let x = x.transpose(1, 2)?;
    let (head, end) = (offset % block, offset + len);
    let first = if head == 0 { 0 } else { (block - head).min(len) };
    let whole = (len - first) / block;
    let mean = |start: usize, len: usize| -> Result<Tensor, BaselineError> {
        Ok(x.narrow(2, start, len)?.to_dtype(DType::F32)?.mean_keepdim(2)?)
    };
    let mut parts = Vec::new();
    if first > 0 {
        parts.push(mean(0, first)?);
    }
    if whole > 0 {
        let (batch, heads, _, dim) = x.dims4()?;
        let body = x.narrow(2, first, whole * block)?.to_dtype(DType::F32)?.contiguous()?;
        parts.push(body.reshape((batch, heads, whole, block, dim))?.mean(3)?);
    }
    let rest = end - (offset + first + whole * block);
    if rest > 0 {
        parts.push(mean(len - rest, rest)?);
    }
    Ok(Tensor::cat(&parts, 2)?)
}

/// Softmax over the key blocks of `scale * <mean query, mean key>`, the blocks beyond the diagonal hidden:
/// `(batch, num_heads, query_blocks, key_blocks)` of f32, key blocks of 128 keys.
///
/// # Errors
/// If Candle fails.
pub fn block_scores(q: &Tensor, k: &Tensor, shape: &AttnShape, scale: f32) -> Result<Tensor, BaselineError> {
    let queries = block_means(q, shape.kv_offset(), BLOCK_Q)?;
    let keys = block_means(k, 0, BLOCK_Q)?;
    let (batch, heads, rows, dim) = queries.dims4()?;
    let (_, kv_heads, columns, _) = keys.dims4()?;
    debug_assert_eq!(rows, query_blocks(shape, true).len());
    // The query heads of a group are rows of one matrix: no KV head is repeated.
    let queries = queries.reshape((batch, kv_heads, heads / kv_heads * rows, dim))?;
    let scores = (queries.matmul(&keys.transpose(2, 3)?.contiguous()?)? * f64::from(scale))?;
    let scores = scores.reshape((batch, heads, rows, columns))?;
    masked_softmax(&scores, &causal_blocks(shape, BLOCK_Q, q.device())?)
}

/// Softmax over the last dimension where `mask`, of the last two dimensions, is not 0; zeros elsewhere.
pub(crate) fn masked_softmax(scores: &Tensor, mask: &Tensor) -> Result<Tensor, BaselineError> {
    let shape = scores.shape();
    let hidden = Tensor::new(f32::NEG_INFINITY, scores.device())?.broadcast_as(shape)?;
    let scores = mask.broadcast_as(shape)?.where_cond(scores, &hidden)?;
    Ok(candle_nn::ops::softmax(&scores, D::Minus1)?)
}
