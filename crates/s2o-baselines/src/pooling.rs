//! Means of blocks of queries and keys, and the scores that several methods compute from them.

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q};

use crate::MAX_INTERMEDIATE;
use crate::bounds::{causal_bounds, seen};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::BaselineError;

/// Means over blocks of `block` tokens of `x` `(batch, len, heads, head_dim)`: `(batch, heads, blocks, head_dim)` of
/// f32. The first token is at position `offset`, and blocks start at positions that are multiples of `block`. The mean
/// of a ragged block is over the tokens present.
///
/// # Errors
/// If `block` is 0 or Candle fails.
pub fn block_means(x: &Tensor, offset: usize, block: usize) -> Result<Tensor, BaselineError> {
    #[cfg(feature = "cuda")]
    if block > 0 && cuda::supports_heads(x) {
        return Ok(cuda::block_pool(x, offset, block, None, false)?.0);
    }
    by_blocks(x, (offset, block), 1, |tokens| Ok(tokens.mean(3)?))
}

/// [`block_means`] and the self-similarity of the blocks, the mean cosine of all pairs of their tokens: `(batch, heads,
/// blocks)`. `centre` `(batch, heads, head_dim)` is first subtracted from every token.
pub(crate) fn self_similar_blocks(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
) -> Result<(Tensor, Tensor), BaselineError> {
    #[cfg(feature = "cuda")]
    if cuda::supports_heads(x)
        && let (means, Some(self_similarity)) = cuda::block_pool(x, offset, block, centre, true)?
    {
        return Ok((means, self_similarity));
    }
    let (batch, _, heads, dim) = x.dims4()?;
    let centre = centre.map(|centre| centre.reshape((batch, heads, 1, 1, dim))).transpose()?;
    // The self-similarity follows the mean as one more element, so the tokens are read once.
    let pooled = by_blocks(x, (offset, block), 1, |tokens| {
        let tokens = match &centre {
            Some(centre) => tokens.broadcast_sub(centre)?,
            None => tokens.clone(),
        };
        let norm = tokens.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(f64::from(f32::MIN_POSITIVE))?;
        // The mean of the products of all pairs is the square of the mean.
        let self_similarity = tokens.broadcast_div(&norm)?.mean(3)?.sqr()?.sum_keepdim(D::Minus1)?;
        Ok(Tensor::cat(&[tokens.mean(3)?, self_similarity], 3)?)
    })?;
    Ok((pooled.narrow(3, 0, dim)?.contiguous()?, pooled.narrow(3, dim, 1)?.squeeze(3)?.contiguous()?))
}

/// The mean of all tokens of `x` `(batch, len, heads, head_dim)`: `(batch, heads, head_dim)` of f32.
pub(crate) fn mean_token(x: &Tensor) -> Result<Tensor, BaselineError> {
    /// Tokens per partial mean, which makes a few thread blocks per multiprocessor at 32K tokens.
    const BLOCK: usize = 512;
    let (batch, len, heads, _) = x.dims4()?;
    let means = block_means(x, 0, BLOCK)?;
    let blocks = means.dim(2)?;
    // Made on the device if all blocks weigh the same: an upload would take a GPU as long as the rest.
    let shares = if len.is_multiple_of(BLOCK) {
        Tensor::full((1.0 / blocks as f64) as f32, (batch, heads, 1, blocks), x.device())?
    } else {
        let shares = (0..len).step_by(BLOCK).map(|start| (BLOCK.min(len - start) as f64 / len as f64) as f32);
        Tensor::from_iter(shares, x.device())?.broadcast_as((batch, heads, 1, blocks))?.contiguous()?
    };
    Ok(shares.matmul(&means)?.squeeze(2)?)
}

/// [`block_means`] with `reduce` instead of the mean: from `(batch, heads, blocks, tokens, head_dim)` of f32 to
/// `(batch, heads, blocks, ..)`. It is called for a bounded number of tokens, so that neither they nor `width` elements
/// for each of them are too many, and for a ragged block alone.
pub(crate) fn by_blocks(
    x: &Tensor,
    (offset, block): (usize, usize),
    width: usize,
    reduce: impl Fn(&Tensor) -> Result<Tensor, BaselineError>,
) -> Result<Tensor, BaselineError> {
    BaselineError::unless(block > 0, "block means", ["block", "at least 1 token"], block)?;
    let (batch, len, heads, dim) = x.dims4()?;
    let x = x.transpose(1, 2)?;
    let part = |start: usize, blocks: usize, tokens: usize| {
        let part = x.narrow(2, start, blocks * tokens)?.to_dtype(DType::F32)?.contiguous()?;
        reduce(&part.reshape((batch, heads, blocks, tokens, dim))?)
    };
    let first = (offset.next_multiple_of(block) - offset).min(len);
    let whole = (len - first) / block;
    let rest = len - first - whole * block;
    let at_once = (MAX_INTERMEDIATE / (batch * block * heads * dim.max(width))).max(1);
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

/// Softmax of `scale * <mean query, mean key>` over the causal key blocks, 0 beyond the diagonal: `(batch, num_heads,
/// query_blocks, key_blocks)` of f32, key blocks of 128 keys.
///
/// # Errors
/// If Candle fails.
pub fn block_scores(q: &Tensor, k: &Tensor, shape: &AttnShape, scale: f32) -> Result<Tensor, BaselineError> {
    let products = block_products(q, k, shape.q_offset())?;
    let bounds = causal_bounds(shape, BLOCK_Q, products.device())?;
    #[cfg(feature = "cuda")]
    if products.device().is_cuda() {
        return Ok(cuda::row_softmax(&products, scale, Some(&bounds))?);
    }
    softmax_of_seen(&products, scale.into(), Some(&seen(&bounds, shape.k_len().div_ceil(BLOCK_Q))?))
}

/// Softmax of `scale * scores` over the entries of the last dimension whose `seen`, broadcast over the leading
/// dimensions, is not 0; without `seen`, over all. The other entries are 0, also in rows without any entry.
pub(crate) fn softmax_of_seen(scores: &Tensor, scale: f64, seen: Option<&Tensor>) -> Result<Tensor, BaselineError> {
    let scores = (scores * scale)?;
    let Some(seen) = seen else { return Ok(candle_nn::ops::softmax_last_dim(&scores)?) };
    let seen = seen.broadcast_as(scores.shape())?;
    let fill = |value: f32| Tensor::new(value, scores.device())?.broadcast_as(scores.shape());
    // Finite, so that a row without any entry gives no NaN.
    let scores = seen.where_cond(&scores, &fill(f32::MIN)?)?;
    Ok(seen.where_cond(&candle_nn::ops::softmax_last_dim(&scores)?, &fill(0.0)?)?)
}

/// `<mean query, mean key>` of blocks of 128, the first query at `offset`: `(batch, num_heads, query_blocks,
/// key_blocks)` of f32.
pub(crate) fn block_products(q: &Tensor, k: &Tensor, offset: usize) -> Result<Tensor, BaselineError> {
    grouped_products(&block_means(q, offset, BLOCK_Q)?, &block_means(k, 0, BLOCK_Q)?)
}

/// `<query, key>` of `queries` `(batch, num_heads, rows, head_dim)` and `keys` `(batch, num_kv_heads, columns,
/// head_dim)`: `(batch, num_heads, rows, columns)`. The query heads of a group are rows of one matrix.
pub(crate) fn grouped_products(queries: &Tensor, keys: &Tensor) -> Result<Tensor, BaselineError> {
    let (batch, heads, rows, dim) = queries.dims4()?;
    let (_, kv_heads, columns, _) = keys.dims4()?;
    let queries = queries.reshape((batch, kv_heads, heads / kv_heads * rows, dim))?;
    let products = queries.matmul(&keys.transpose(2, 3)?)?;
    Ok(products.reshape((batch, heads, rows, columns))?)
}

/// Sums over blocks of 128 in the last dimension. The last block may be shorter.
pub(crate) fn block_sums(x: &Tensor) -> Result<Tensor, BaselineError> {
    Ok(in_blocks(x)?.sum(D::Minus1)?)
}

/// Splits the last dimension into blocks of 128, filled up with zeros.
pub(crate) fn in_blocks(x: &Tensor) -> Result<Tensor, BaselineError> {
    let len = x.dim(D::Minus1)?;
    let blocks = len.div_ceil(BLOCK_Q);
    let mut sizes = x.dims().to_vec();
    sizes.pop();
    sizes.extend([blocks, BLOCK_Q]);
    Ok(x.pad_with_zeros(D::Minus1, 0, blocks * BLOCK_Q - len)?.reshape(sizes)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_token_weighs_the_same_in_the_mean() {
        // A ragged last block of the partial means, and none.
        for len in [700, 1024] {
            let x = Tensor::arange(0f32, len as f32, &Device::Cpu).unwrap().reshape((1, len, 1, 1)).unwrap();
            let mean = mean_token(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!((mean[0] - (len - 1) as f32 / 2.0).abs() < 1e-3, "{len}: {mean:?}");
        }
    }
}
