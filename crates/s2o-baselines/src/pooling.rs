//! Blocks of queries and keys stood for by their means, as several methods score them.

use candle_core::{DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q};

use crate::LARGEST_INTERMEDIATE;
use crate::error::BaselineError;
use crate::mask::causal_blocks;

/// Means over blocks of `block` tokens, cut at multiples of the absolute position: `x` `(batch, len, heads, head_dim)`,
/// its first token at position `offset`, becomes `(batch, heads, blocks, head_dim)` of f32. Ragged blocks are means of
/// the tokens that they have.
///
/// # Errors
/// If `block` is 0 or Candle fails.
pub fn block_means(x: &Tensor, offset: usize, block: usize) -> Result<Tensor, BaselineError> {
    by_blocks(x, offset, block, |tokens| Ok(tokens.mean(3)?))
}

/// [`block_means`] with `reduce` in place of the mean: from `(batch, heads, blocks, tokens, head_dim)` of f32 to
/// `(batch, heads, blocks, ..)`. It is called for a bounded number of tokens at a time, and for a ragged block alone.
pub(crate) fn by_blocks(
    x: &Tensor,
    offset: usize,
    block: usize,
    reduce: impl Fn(&Tensor) -> Result<Tensor, BaselineError>,
) -> Result<Tensor, BaselineError> {
    if block == 0 {
        return Err(BaselineError::option("block means", "block", "at least 1 token", block));
    }
    let (batch, len, heads, dim) = x.dims4()?;
    let x = x.transpose(1, 2)?;
    let part = |start: usize, blocks: usize, tokens: usize| {
        let part = x.narrow(2, start, blocks * tokens)?.to_dtype(DType::F32)?.contiguous()?;
        reduce(&part.reshape((batch, heads, blocks, tokens, dim))?)
    };
    let first = (offset.next_multiple_of(block) - offset).min(len);
    let whole = (len - first) / block;
    let rest = len - first - whole * block;
    let at_once = (LARGEST_INTERMEDIATE / (batch * block * heads * dim)).max(1);
    let mut parts = Vec::new();
    if first > 0 {
        parts.push(part(0, 1, first)?);
    }
    for done in (0..whole).step_by(at_once) {
        parts.push(part(first + done * block, at_once.min(whole - done), block)?);
    }
    if rest > 0 {
        parts.push(part(len - rest, 1, rest)?);
    }
    Ok(Tensor::cat(&parts, 2)?)
}

/// Softmax over the key blocks of `scale * <mean query, mean key>`, the blocks beyond the diagonal hidden:
/// `(batch, num_heads, query_blocks, key_blocks)` of f32, key blocks of 128 keys.
///
/// # Errors
/// If Candle fails.
pub fn block_scores(q: &Tensor, k: &Tensor, shape: &AttnShape, scale: f32) -> Result<Tensor, BaselineError> {
    visible_block_scores(q, k, shape.kv_offset(), scale, &causal_blocks(shape, BLOCK_Q, q.device())?)
}

/// As [`block_scores`], over the key blocks that `visible`, `(query_blocks, key_blocks)`, leaves; the first query is at
/// position `offset`. Zeros where it leaves none.
pub(crate) fn visible_block_scores(
    q: &Tensor,
    k: &Tensor,
    offset: usize,
    scale: f32,
    visible: &Tensor,
) -> Result<Tensor, BaselineError> {
    let queries = block_means(q, offset, BLOCK_Q)?;
    let keys = block_means(k, 0, BLOCK_Q)?;
    let scores = (grouped_products(&queries, &keys)? * f64::from(scale))?;
    masked_softmax(&scores, visible)
}

/// `<query, key>` of `queries` `(batch, num_heads, rows, head_dim)` and `keys` `(batch, num_kv_heads, columns, head_dim)`:
/// `(batch, num_heads, rows, columns)`. The query heads of a group are rows of one matrix: no KV head is repeated.
pub(crate) fn grouped_products(queries: &Tensor, keys: &Tensor) -> Result<Tensor, BaselineError> {
    let (batch, heads, rows, dim) = queries.dims4()?;
    let (_, kv_heads, columns, _) = keys.dims4()?;
    let queries = queries.reshape((batch, kv_heads, heads / kv_heads * rows, dim))?;
    let products = queries.matmul(&keys.transpose(2, 3)?.contiguous()?)?;
    Ok(products.reshape((batch, heads, rows, columns))?)
}

/// Softmax over the last dimension where `mask`, broadcast over the leading dimensions, is not 0; zeros elsewhere, also
/// in rows whose mask is 0 throughout.
pub(crate) fn masked_softmax(scores: &Tensor, mask: &Tensor) -> Result<Tensor, BaselineError> {
    let shape = scores.shape();
    let mask = mask.broadcast_as(shape)?;
    let fill = |value: f32| Tensor::new(value, scores.device())?.broadcast_as(shape);
    // Finite, so that a row without any entry gives no NaN.
    let visible = mask.where_cond(scores, &fill(f32::MIN)?)?;
    Ok(mask.where_cond(&candle_nn::ops::softmax_last_dim(&visible)?, &fill(0.0)?)?)
}
