//! FlashPrefill: blocks whose score is not far below the greatest of their row.

use candle_core::{D, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, PrefillCall};

use crate::attention::shape_of;
use crate::bounds::{Bands, bands};
use crate::error::BaselineError;
use crate::mask::BlockMask;
use crate::pooling::{block_means, by_blocks, grouped_products};
use crate::selector::{BlockSelector, Selection};

const NAME: &str = "flashprefill";
/// Blocks that every query block takes: the first ones, and the last ones up to its own.
const SINK: usize = 2;
const WINDOW: usize = 4;
/// Query blocks at the end of the prompt that take everything.
const DENSE: usize = 2;

/// FlashPrefill ("FlashPrefill: Instantaneous Pattern Discovery and Thresholding for Ultra-Fast Long-Context
/// Prefilling", arXiv 2603.06199).
///
/// The score of a key block of 128 keys is the sum of `exp(scale * <query, mean key>)` over the 128 queries of a query
/// block that are not before the key block's last key. A query block takes the key blocks whose score is at least
/// `alpha` times the greatest of its row: nothing is sorted or summed up. It also takes the first 2 blocks and the last
/// 4 up to its own; the last 2 query blocks of the prompt take everything.
///
/// Default, as published for Qwen3: `alpha` 0.12 (0.18 for Llama-3.1). The published code fills a ragged last block
/// with zeros and takes the whole call as the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlashPrefill {
    alpha: f64,
}

impl FlashPrefill {
    /// The least score of a block that is taken, relative to the greatest of its row; 0 is dense attention.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside [0, 1].
    pub fn alpha(self, alpha: f64) -> Result<Self, BaselineError> {
        BaselineError::unless((0.0..=1.0).contains(&alpha), NAME, ["alpha", "a number from 0 to 1"], alpha)?;
        Ok(Self { alpha })
    }
}

impl Default for FlashPrefill {
    fn default() -> Self {
        Self { alpha: 0.12 }
    }
}

impl BlockSelector for FlashPrefill {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let scores = log_scores(q, k, &shape, call.softmax_scale)?;
        let least = (scores.max_keepdim(D::Minus1)? + self.alpha.ln())?;
        let scored = scores.gt(f32::MIN)?;
        let first_dense = call.prompt_len.div_ceil(BLOCK_Q).saturating_sub(DENSE);
        let always = bands(&shape, BLOCK_Q, q.device(), |block| match block {
            block if block >= first_dense => (0..block + 1).into(),
            block => Bands { sink: SINK.min(block + 1), window: (block + 1).saturating_sub(WINDOW)..block + 1 },
        })?;
        let chosen = (scores.broadcast_ge(&least)? * scored)?;
        Ok(BlockMask::within_diagonal(chosen.broadcast_maximum(&always)?, BLOCK_Q).into_keys()?.into())
    }
}

/// The logarithms of the scores, `(batch, num_heads, query_blocks, key_blocks)` of f32; `f32::MIN` for pairs of blocks
/// without a score.
fn log_scores(q: &Tensor, k: &Tensor, shape: &AttnShape, scale: f32) -> Result<Tensor, BaselineError> {
    let means = block_means(k, 0, BLOCK_Q)?;
    let (batch, heads, blocks) = (shape.batch(), shape.num_heads(), means.dim(2)?);
    // Over all queries of a block, and of its last query, which alone may see the block's own last key.
    let both = by_blocks(q, (shape.q_offset(), BLOCK_Q), blocks, |queries| {
        let (_, _, query_blocks, rows, dim) = queries.dims5()?;
        let products = grouped_products(&queries.reshape((batch, heads, query_blocks * rows, dim))?, &means)?;
        let products = (products.reshape((batch, heads, query_blocks, rows, blocks))? * f64::from(scale))?;
        let sums = products.log_sum_exp(3)?;
        Ok(Tensor::cat(&[sums, products.narrow(3, rows - 1, 1)?.squeeze(3)?], D::Minus1)?)
    })?;
    let half = |from| both.narrow(D::Minus1, from, blocks)?.contiguous();
    let (sums, last) = (half(0)?, half(blocks)?);
    let none = Tensor::full(f32::MIN, (batch, heads, both.dim(2)?, blocks), q.device())?;
    let earlier = bands(shape, BLOCK_Q, q.device(), |block| (0..block).into())?;
    let own = bands(shape, BLOCK_Q, q.device(), |block| {
        let is_whole = (block + 1) * BLOCK_Q <= shape.k_len();
        if is_whole { (block..block + 1).into() } else { (0..0).into() }
    })?;
    let scores = own.broadcast_as(none.shape())?.where_cond(&last, &none)?;
    let scores = earlier.broadcast_as(none.shape())?.where_cond(&sums, &scores)?;
    Ok(scores)
}
