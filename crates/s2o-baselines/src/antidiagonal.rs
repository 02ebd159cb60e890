//! Antidiagonal scores of blocks of queries and keys, as in XAttention.

use std::ops::Range;

use candle_core::{DType, Tensor};
use candle_s2o::BLOCK_Q;

use crate::MAX_INTERMEDIATE;
use crate::attention::shape_of;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::BaselineError;
use crate::pooling::softmax_of_seen;

/// The stride of the publication.
pub(crate) const STRIDE: usize = 16;

/// Most elements of a tensor on a GPU: 1 GiB of 16-bit elements.
const MAX_ELEMENTS_ON_GPU: usize = 1 << 29;
/// Number of parts into which query blocks are split on a GPU. A part is multiplied only with the keys that its last
/// block sees, so all parts together compute about half of all pairs.
const PARTS_ON_GPU: usize = 16;
/// Fewest query blocks per part: fewer rows do not fill a GPU.
const MIN_BLOCKS_ON_GPU: usize = 32;

/// Antidiagonal scores of key blocks for query blocks, both of 128: `(batch, num_heads, query_blocks, key_blocks)` of
/// f32.
///
/// Queries and keys are cut into strides of `stride` tokens, a divisor of 128, at multiples of the absolute position. A
/// query stride is compared with a key stride along their antidiagonal: its last query with the first key, and so on.
/// The mean of these products times `scale` is the logit of the pair, its softmax over the key strides up to the
/// query's own is the weight of the pair, and the score of a block is the sum of the weights of its pairs. Missing
/// tokens are zeros. Query strides without a query have weight 0.
///
/// # Errors
/// If the stride does not divide 128, the shapes do not fit, or Candle fails.
pub fn antidiagonal_scores(q: &Tensor, k: &Tensor, stride: usize, scale: f32) -> Result<Tensor, BaselineError> {
    let stride = checked_stride("antidiagonal scores", stride)?;
    let antidiagonals = Antidiagonals { stride, scale, offset: shape_of(q, k, k)?.q_offset() };
    antidiagonals.scores(q, k, |query_stride| query_stride + 1)
}

/// Returns `stride` if it divides 128.
pub(crate) fn checked_stride(method: &'static str, stride: usize) -> Result<usize, BaselineError> {
    let fits = stride > 0 && BLOCK_Q.is_multiple_of(stride);
    BaselineError::unless(fits, method, ["stride", "a divisor of 128"], stride)?;
    Ok(stride)
}

/// Order of the tokens inside a stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrideOrder {
    /// Ascending position.
    Forward,
    /// The last token first.
    Backward,
}

/// Settings for the scores of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Antidiagonals {
    pub(crate) stride: usize,
    pub(crate) scale: f32,
    /// Position of the first query.
    pub(crate) offset: usize,
}

impl Antidiagonals {
    /// As [`antidiagonal_scores`], but query stride `n` sees the first `visible(n)` key strides.
    pub(crate) fn scores(
        &self,
        q: &Tensor,
        k: &Tensor,
        visible: impl Fn(usize) -> usize,
    ) -> Result<Tensor, BaselineError> {
        let (batch, q_len, heads, dim) = q.dims4()?;
        let (_, k_len, kv_heads, _) = k.dims4()?;
        let group = heads / kv_heads;
        let blocks = self.offset / BLOCK_Q..(self.offset + q_len).div_ceil(BLOCK_Q);
        let per_block = BLOCK_Q / self.stride;
        // Pairs of strides per query block and KV head.
        let pairs = group * per_block * per_block * k_len.div_ceil(BLOCK_Q);
        let (heads_at_once, blocks_at_once) = if q.device().is_cuda() {
            let heads = (MAX_ELEMENTS_ON_GPU / (k_len * dim)).clamp(1, kv_heads);
            let few = blocks.len().div_ceil(PARTS_ON_GPU).max(MIN_BLOCKS_ON_GPU);
            (heads, few.min(MAX_ELEMENTS_ON_GPU / (heads * pairs)).max(1))
        } else {
            let heads = MAX_INTERMEDIATE / (blocks.len() * pairs).max(group * k_len * dim);
            let heads = heads.clamp(1, kv_heads);
            (heads, (MAX_INTERMEDIATE / (heads * pairs)).max(1))
        };
        let mut sequences = Vec::with_capacity(batch);
        for sequence in 0..batch {
            let (q, k) = (q.get(sequence)?, k.get(sequence)?);
            let mut of_heads = Vec::new();
            for first in (0..kv_heads).step_by(heads_at_once) {
                let count = heads_at_once.min(kv_heads - first);
                let keys = k.narrow(1, first, count)?;
                let keys = self.strides(&keys, [0, k_len.next_multiple_of(BLOCK_Q) - k_len], StrideOrder::Forward)?;
                let q = q.narrow(1, first * group, count * group)?;
                let parts = blocks.clone().step_by(blocks_at_once);
                let parts = parts.map(|block| block..(block + blocks_at_once).min(blocks.end));
                let rows = parts.map(|blocks| self.rows(&q, &keys, blocks, &visible)).collect::<Result<Vec<_>, _>>()?;
                of_heads.push(Tensor::cat(&rows, 1)?);
            }
            sequences.push(Tensor::cat(&of_heads, 0)?);
        }
        Ok(Tensor::stack(&sequences, 0)?)
    }

    /// Scores `(heads, blocks, key_blocks)` of the query blocks `blocks`, from `q` `(q_len, heads, head_dim)` and
    /// `keys` `(kv_heads, key_strides, stride * head_dim)`.
    fn rows(
        &self,
        q: &Tensor,
        keys: &Tensor,
        blocks: Range<usize>,
        visible: &impl Fn(usize) -> usize,
    ) -> Result<Tensor, BaselineError> {
        let (q_len, heads, _) = q.dims3()?;
        let (kv_heads, key_strides, width) = keys.dims3()?;
        let (per_block, device) = (BLOCK_Q / self.stride, q.device());
        let (offset, end) = (self.offset, self.offset + q_len);
        let rows = blocks.start * per_block..blocks.end * per_block;
        let limits = rows.clone().map(|row| {
            let has_queries = (row + 1) * self.stride > offset && row * self.stride < end;
            if has_queries { visible(row).min(key_strides) as u32 } else { 0 }
        });
        let limits: Vec<u32> = limits.collect();
        let columns = limits.iter().max().map_or(0, |&columns| (columns as usize).next_multiple_of(per_block));
        if columns == 0 {
            return Ok(Tensor::zeros((heads, blocks.len(), key_strides / per_block), DType::F32, device)?);
        }
        let limits = Tensor::from_vec(limits, rows.len(), device)?;

        let (start, stop) = (offset.max(blocks.start * BLOCK_Q), end.min(blocks.end * BLOCK_Q));
        let missing = [start - blocks.start * BLOCK_Q, blocks.end * BLOCK_Q - stop];
        // The last query of a stride is multiplied with the first key.
        let queries = self.strides(&q.narrow(0, start - offset, stop - start)?, missing, StrideOrder::Backward)?;
        // The query heads of a group are rows of one matrix, so no KV head is repeated.
        let queries = queries.reshape((kv_heads, heads / kv_heads * rows.len(), width))?;
        let products = queries.matmul(&keys.narrow(1, 0, columns)?.transpose(1, 2)?)?;
        let products = products.reshape((heads, rows.len(), columns))?;
        let (key_blocks, scale) = (key_strides / per_block, f64::from(self.scale) / self.stride as f64);
        #[cfg(feature = "cuda")]
        if cuda::supports(&products) {
            return Ok(cuda::stride_shares(&products, &limits, per_block, key_blocks, scale as f32)?);
        }
        let limits = limits.reshape((rows.len(), 1))?;
        let seen = Tensor::arange(0, columns as u32, device)?.reshape((1, columns))?.broadcast_lt(&limits)?;
        let weights = softmax_of_seen(&products.to_dtype(DType::F32)?, scale, Some(&seen))?;
        let by_block = (heads, blocks.len(), per_block, columns / per_block, per_block);
        let scores = weights.reshape(by_block)?.sum((2, 4))?;
        Ok(scores.pad_with_zeros(2, 0, key_blocks - columns / per_block)?)
    }

    /// Joins the tokens of each stride in `order`: `x` `(len, heads, head_dim)`, padded with zeros at both ends,
    /// becomes `(heads, strides, stride * head_dim)`. It keeps its dtype on a GPU, as in the published code; otherwise
    /// it becomes f32.
    fn strides(&self, x: &Tensor, missing: [usize; 2], order: StrideOrder) -> Result<Tensor, BaselineError> {
        #[cfg(feature = "cuda")]
        if cuda::supports_copies(x) {
            return Ok(cuda::token_strides(x, self.stride, missing, order)?);
        }
        let [before, after] = missing;
        let (len, heads, dim) = x.dims3()?;
        let dtype = if x.device().is_cuda() { x.dtype() } else { DType::F32 };
        let x = x.transpose(0, 1)?.contiguous()?.to_dtype(dtype)?;
        let x = x.pad_with_zeros(1, before, after)?;
        let strides = (before + len + after) / self.stride;
        let x = match order {
            StrideOrder::Forward => x,
            StrideOrder::Backward => {
                let order = Tensor::from_iter((0..self.stride as u32).rev(), x.device())?;
                x.reshape((heads, strides, self.stride, dim))?.index_select(&order, 2)?
            }
        };
        Ok(x.reshape((heads, strides, self.stride * dim))?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn scores_of_queries_that_see_nothing_are_zeros() {
        let x = Tensor::ones((1, 300, 2, 8), DType::F32, &Device::Cpu).unwrap();
        let antidiagonals = Antidiagonals { stride: STRIDE, scale: 1.0, offset: 0 };
        let scores = antidiagonals.scores(&x, &x, |_| 0).unwrap().squeeze(0).unwrap();
        assert_eq!(scores.to_vec3::<f32>().unwrap(), [[[0.0; 3]; 3]; 2]);
    }
}
