//! Verticals and slashes: keys, and distances from query back to key, that receive attention from many queries.

use std::ops::Range;

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, Mask, query_blocks};

use crate::attention_rows::{attention_rows, last_rows};
#[cfg(feature = "cuda")]
use crate::cuda::last_query_scores;
use crate::error::BaselineError;
use crate::pooling::in_blocks;

/// Mean attention of the last queries of a call, each `(batch, num_heads, k_len)` of f32 with sum 1. A slash that
/// leaves the matrix at the left lacks the part beyond it.
pub(crate) struct LastQueries {
    /// By key.
    pub verticals: Tensor,
    /// By distance from query back to key.
    pub slashes: Tensor,
}

impl LastQueries {
    /// From the last `count` queries of the call, or from all if it has fewer.
    pub fn of(q: &Tensor, k: &Tensor, shape: &AttnShape, scale: f32, count: usize) -> Result<Self, BaselineError> {
        #[cfg(feature = "cuda")]
        if last_query_scores::supports(q, k, count) {
            let [verticals, slashes] = last_query_scores::by_key_and_distance(q, k, scale, count)?;
            return Ok(Self { verticals, slashes });
        }
        let rows = last_rows(shape, count);
        let [verticals, slashes] = attention_rows([q, k], shape, scale, &rows, |_, attention| {
            Ok([attention.mean(1)?, (diagonal_sums(attention)? / rows.len() as f64)?])
        })?;
        let sizes = (shape.batch(), shape.num_heads(), shape.k_len());
        Ok(Self { verticals: verticals.reshape(sizes)?, slashes: slashes.reshape(sizes)? })
    }
}

/// Sums over the diagonals of `(heads, rows, k_len)`, whose rows are the last positions: `(heads, k_len)` by distance.
fn diagonal_sums(attention: &Tensor) -> Result<Tensor, BaselineError> {
    let (heads, rows, k_len) = attention.dims3()?;
    // Reshaped to rows one entry longer, each row starts one column further to the left.
    let skewed = attention.pad_with_zeros(2, rows, 0)?.reshape((heads, rows * (k_len + rows)))?;
    let skewed = skewed.pad_with_zeros(1, 0, rows)?.reshape((heads, rows, k_len + rows + 1))?;
    Ok(skewed.sum(1)?.narrow(1, 1, k_len)?.contiguous()?.flip(&[1])?)
}

/// Converts chosen distances in tokens `(.., k_len)` to distances in blocks `(.., key_blocks)` between a query block
/// and the key blocks that they touch; both are u8. A distance that is not a multiple of the block touches two.
pub(crate) fn blocks_of_distances(distances: &Tensor) -> Result<Tensor, BaselineError> {
    let distances = in_blocks(&distances.to_dtype(DType::F32)?)?;
    let near = distances.sum(D::Minus1)?;
    let blocks = near.dim(D::Minus1)?;
    let beyond = distances.narrow(D::Minus1, 1, BLOCK_Q - 1)?.sum(D::Minus1)?;
    let far = beyond.pad_with_zeros(D::Minus1, 1, 0)?.narrow(D::Minus1, 0, blocks)?;
    Ok((near + far)?.gt(0f32)?)
}

/// The mask `(batch, num_heads, query_blocks, key_blocks)` of `verticals` (key blocks for every query block) and
/// `slashes` (distances in blocks); both are `(batch, num_heads, key_blocks)`, all u8. It is undefined beyond the
/// diagonal.
pub(crate) fn vertical_slash_mask(
    verticals: &Tensor,
    slashes: &Tensor,
    shape: &AttnShape,
) -> Result<Tensor, BaselineError> {
    let (batch, heads, key_blocks) = slashes.dims3()?;
    let first = shape.q_offset() / BLOCK_Q;
    let rows = query_blocks(shape, Mask::Causal).len();
    let count = |range: Range<usize>| Tensor::arange(range.start as f32, range.end as f32, slashes.device());
    let distances = count(first..first + rows)?.unsqueeze(1)?.broadcast_sub(&count(0..key_blocks)?.unsqueeze(0)?)?;
    let distances = distances.relu()?.to_dtype(DType::U32)?.flatten_all()?;
    let mask = slashes.index_select(&distances, 2)?.reshape((batch, heads, rows, key_blocks))?;
    Ok(mask.broadcast_maximum(&verticals.unsqueeze(2)?)?)
}
