//! FlexPrefill: the attention of the last queries decides the pattern of each head.

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, PrefillCall};

use crate::attention::shape_of;
use crate::bounds::for_all_heads;
use crate::error::BaselineError;
use crate::mask::{BlockMask, causal_blocks};
use crate::pooling::{block_means, block_scores, block_sums, grouped_products};
use crate::row_choice::{RowChoice, Select, top_cdf, top_k};
use crate::selector::{BlockSelector, Selection};
use crate::slash::{LastQueries, vertical_slash_mask};

const NAME: &str = "flexprefill";

/// Added to an attention mass (at most 1), lifts it above all others.
const FORCED: f32 = 2.0;

/// FlexPrefill ("FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference",
/// arXiv 2502.20766).
///
/// The exact attention of the call's last 128 queries, averaged and summed over key blocks, is compared with the
/// estimate from their mean and the mean key of each block. If the square root of the Jensen-Shannon divergence
/// (natural logarithm) of the two is below `tau`, the head is query-aware, otherwise vertical-slash:
///
/// - **query-aware**: takes the softmax of mean queries and mean keys over the causal blocks. Over all rows together,
///   the greatest entries are chosen until they hold the share `gamma` of the total;
/// - **vertical-slash**: counts the single keys, in descending order of the attention from the last queries, that hold
///   the share `gamma`. The count in whole blocks plus 1 is the number of blocks of 128 keys, those with the greatest
///   sums, to take. Distances are chosen in the same way.
///
/// Every head takes at least `min_budget` tokens of verticals and as many of slashes, starting with the first key block
/// and the diagonal. Query-aware heads take exactly that many in addition to their own blocks.
///
/// Defaults, as published: `gamma` 0.9, `tau` 0.1, `min_budget` 1024, blocks of 128. Differences from the publication:
/// distances are grouped from the diagonal on also if the prompt ends inside a block; a chunk of a prompt uses its own
/// last 128 queries; a `gamma` of 1 selects everything, including blocks whose attention is zero in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlexPrefill {
    gamma: f64,
    tau: f64,
    min_budget: usize,
}

/// The pattern of a head in [`FlexPrefill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlexPattern {
    /// Blocks chosen by mean queries and mean keys.
    QueryAware,
    /// Keys and distances chosen by the attention of the last queries.
    VerticalSlash,
}

impl Default for FlexPrefill {
    fn default() -> Self {
        Self { gamma: 0.9, tau: 0.1, min_budget: 1024 }
    }
}

impl FlexPrefill {
    /// The share of attention that the choice must hold.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn gamma(self, gamma: f64) -> Result<Self, BaselineError> {
        BaselineError::unless(gamma > 0.0 && gamma <= 1.0, NAME, ["gamma", "above 0, up to 1"], gamma)?;
        Ok(Self { gamma, ..self })
    }

    /// Heads whose divergence (its square root) is below `tau` are query-aware: none at 0, all at 1.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside [0, 1].
    pub fn tau(self, tau: f64) -> Result<Self, BaselineError> {
        BaselineError::unless((0.0..=1.0).contains(&tau), NAME, ["tau", "0 to 1"], tau)?;
        Ok(Self { tau, ..self })
    }

    /// Fewest tokens of verticals and of slashes per head, rounded up to whole blocks and to at least one block.
    pub fn min_budget(self, tokens: usize) -> Self {
        Self { min_budget: tokens, ..self }
    }

    /// The pattern of each head (`b * num_heads + h`) of a call, read back from the device; for reports.
    ///
    /// # Errors
    /// If the shapes do not fit, or Candle fails.
    pub fn patterns(&self, call: &PrefillCall, q: &Tensor, k: &Tensor) -> Result<Vec<FlexPattern>, BaselineError> {
        let shape = shape_of(q, k, k)?;
        let last = LastQueries::of(q, k, &shape, call.softmax_scale, BLOCK_Q)?;
        let query_aware = self.query_aware(&block_sums(&last.verticals)?, [q, k], &shape, call.softmax_scale)?;
        let query_aware = query_aware.flatten_all()?.to_vec1::<u8>()?;
        let pattern = |chosen| if chosen == 0 { FlexPattern::VerticalSlash } else { FlexPattern::QueryAware };
        Ok(query_aware.into_iter().map(pattern).collect())
    }

    /// 1 for query-aware heads, `(batch, num_heads, 1)` of u8, from the attention of the last queries to each block.
    fn query_aware(
        &self,
        attention: &Tensor,
        [q, k]: [&Tensor; 2],
        shape: &AttnShape,
        scale: f32,
    ) -> Result<Tensor, BaselineError> {
        let last = BLOCK_Q.min(shape.q_len());
        let query = block_means(&q.narrow(1, shape.q_len() - last, last)?, 0, last)?;
        let scores = grouped_products(&query, &block_means(k, 0, BLOCK_Q)?)?;
        let estimate = candle_nn::ops::softmax(&(scores * f64::from(scale))?, D::Minus1)?.squeeze(2)?;
        let middle = ((attention + &estimate)? * 0.5)?;
        // With this minimum, x log x is 0 at x = 0, not NaN.
        let log = |x: &Tensor| x.maximum(f64::from(f32::MIN_POSITIVE))?.log();
        let divergence = |x: &Tensor| (x * (log(x)? - log(&middle)?)?)?.sum_keepdim(D::Minus1);
        let divergence = ((divergence(attention)? + divergence(&estimate)?)? * 0.5)?;
        Ok(divergence.maximum(0.0)?.sqrt()?.lt(self.tau as f32)?)
    }
}

impl BlockSelector for FlexPrefill {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let scale = call.softmax_scale;
        if self.gamma >= 1.0 {
            let all = for_all_heads(&causal_blocks(&shape, BLOCK_Q, q.device())?, &shape)?;
            return Ok(BlockMask::within_diagonal(all, BLOCK_Q).into_keys()?.into());
        }
        let last = LastQueries::of(q, k, &shape, scale, BLOCK_Q)?;
        let blocks = shape.k_len().div_ceil(BLOCK_Q);
        let first = Tensor::new(FORCED, q.device())?.reshape(1)?.pad_with_zeros(0, 0, blocks - 1)?;
        let least = self.min_budget.div_ceil(BLOCK_Q).max(1) as f64;
        let sums = block_sums(&last.verticals)?;
        let query_aware = self.query_aware(&sums, [q, k], &shape, scale)?;
        let chosen = |tokens: &Tensor, sums: &Tensor| -> Result<Tensor, BaselineError> {
            let count = top_cdf(tokens, self.gamma)?.to_dtype(DType::F32)?.sum_keepdim(D::Minus1)?;
            let count = ((count / BLOCK_Q as f64)?.floor()? + 1.0)?.maximum(least)?;
            let count = query_aware.where_cond(&(count.ones_like()? * least)?, &count)?;
            top_k(&sums.broadcast_add(&first)?, &count)
        };
        let verticals = chosen(&last.verticals, &sums)?;
        let slashes = chosen(&last.slashes, &block_sums(&last.slashes)?)?;
        let mask = BlockMask::new(&vertical_slash_mask(&verticals, &slashes, &shape)?, &shape, BLOCK_Q)?;
        let pooled = block_scores(q, k, &shape, scale)?;
        // The choice is over all rows of a head together.
        let forced = mask.tensor().flatten_from(2)?;
        let choice = RowChoice { forced: Some(&forced), enabled: Some(&query_aware), ..RowChoice::default() };
        let mask = choice.choose(&pooled.flatten_from(2)?, Select::TopP(&[self.gamma]))?.reshape(pooled.shape())?;
        Ok(BlockMask::within_diagonal(mask, BLOCK_Q).into_keys()?.into())
    }
}
