//! Keys reordered inside their segments, as PBS-Attn does. An order is the positions of the keys, `(batch, heads,
//! before)` of u32, for each KV head or each query head. Only segments with later keys are reordered.

use candle_core::Tensor;
use candle_s2o::{AttnShape, BLOCK_Q};

use crate::attention_rows::{attention_rows, last_rows};
#[cfg(feature = "cuda")]
use crate::cuda::{self, last_query_scores};
use crate::error::BaselineError;
use crate::selector::Reordered;

/// Orders by descending `attention` `(batch, heads, k_len)` inside segments of `segment` keys, a multiple of 128. Of
/// equal keys the lower comes first on the CPU; on a GPU their order is undefined.
pub(crate) fn descending(attention: &Tensor, segment: usize) -> Result<Tensor, BaselineError> {
    let (batch, heads, k_len) = attention.dims3()?;
    let segments = (k_len - 1) / segment;
    let by_segment = attention.narrow(2, 0, segments * segment)?.reshape((batch * heads * segments, segment))?;
    let inside = by_segment.contiguous()?.arg_sort_last_dim(false)?.reshape((batch, heads, segments, segment))?;
    let starts = Tensor::arange_step(0, (segments * segment) as u32, segment as u32, attention.device())?;
    let positions = inside.broadcast_add(&starts.reshape((1, 1, segments, 1))?)?;
    Ok(positions.reshape((batch, heads, segments * segment))?)
}

/// 1 for the reordered block that holds the first key: `(batch, heads, 1, blocks)` of u8.
pub(crate) fn first_key_block(order: &Tensor) -> Result<Tensor, BaselineError> {
    let (batch, heads, len) = order.dims3()?;
    let first = order.eq(0u32)?.reshape((batch, heads, len / BLOCK_Q, BLOCK_Q))?;
    Ok(first.max(3)?.unsqueeze(2)?)
}

/// Keys and values in `order`, followed by all of them in their original order.
pub(crate) fn reorder(k: &Tensor, v: &Tensor, order: &Tensor) -> Result<Reordered, BaselineError> {
    #[cfg(feature = "cuda")]
    if cuda::supports_copies(k) && k.dtype() == v.dtype() {
        let [k, v] = cuda::reorder_keys(k, v, order)?;
        return Ok(Reordered { k, v });
    }
    let (batch, k_len, kv_heads, dim) = k.dims4()?;
    let (_, heads, before) = order.dims3()?;
    let device = k.device();
    let natural = Tensor::arange(0, k_len as u32, device)?.broadcast_as((batch, heads, k_len))?;
    let positions = Tensor::cat(&[order, &natural.contiguous()?], 2)?.transpose(1, 2)?;
    // Row numbers in the matrix of all keys, which is ordered by (batch, position, head).
    let kv_head = Tensor::from_iter((0..heads as u32).map(|head| head * kv_heads as u32 / heads as u32), device)?;
    let sequence = Tensor::from_iter((0..batch).map(|sequence| (sequence * k_len * kv_heads) as u32), device)?;
    let rows = (positions.contiguous()? * kv_heads as f64)?;
    let rows = rows.broadcast_add(&kv_head.reshape((1, 1, heads))?)?;
    let rows = rows.broadcast_add(&sequence.reshape((batch, 1, 1))?)?.flatten_all()?;
    let reordered = |x: &Tensor| {
        let x = x.contiguous()?.reshape((batch * k_len * kv_heads, dim))?;
        x.index_select(&rows, 0)?.reshape((batch, before + k_len, heads, dim))
    };
    Ok(Reordered { k: reordered(k)?, v: reordered(v)? })
}

/// Mean causal attention of each key from the last 128 queries of a call: `(batch, num_heads, k_len)` of f32.
pub(crate) fn attention_of_last_block(
    q: &Tensor,
    k: &Tensor,
    shape: &AttnShape,
    scale: f32,
) -> Result<Tensor, BaselineError> {
    #[cfg(feature = "cuda")]
    if last_query_scores::supports(q, k, BLOCK_Q) {
        return Ok(last_query_scores::by_key(q, k, scale, BLOCK_Q)?);
    }
    let rows = last_rows(shape, BLOCK_Q);
    let [mean] = attention_rows([q, k], shape, scale, &rows, |_, attention| Ok([attention.mean(1)?]))?;
    Ok(mean.reshape((shape.batch(), shape.num_heads(), shape.k_len()))?)
}
