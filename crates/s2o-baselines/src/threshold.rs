//! The cut between what is chosen of a row and what is not, found without sorting.

use candle_core::{D, Tensor};

use crate::error::BaselineError;

/// What the chosen entries of a row add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weight {
    /// Their values.
    Values,
    /// Their number.
    Count,
}

/// For every row (last dimension) of `scores`, non-negative f32: the greatest value for which all entries that are not
/// less add up to what is `wanted`, within 2^-40 of the row's largest entry; 0 if none does. `wanted` and the result have
/// a last dimension of 1. Candle sorts only rows of up to 1024 entries on a GPU, so this is how rows are cut there.
pub(crate) fn greatest_threshold(scores: &Tensor, wanted: &Tensor, weight: Weight) -> Result<Tensor, BaselineError> {
    #[cfg(feature = "cuda")]
    if scores.device().is_cuda() {
        use candle_s2o::cuda::{RowWeight, row_thresholds};
        let weight = match weight {
            Weight::Values => RowWeight::Values,
            Weight::Count => RowWeight::Count,
        };
        return Ok(row_thresholds(scores, wanted, weight)?);
    }
    /// Halvings of (0, twice the largest]: f32 has 24 bits of fraction, and the threshold may be 2^-16 of the largest.
    const STEPS: usize = 40;
    let mut high = (scores.max_keepdim(D::Minus1)? * 2.0)?;
    let mut low = high.zeros_like()?;
    for _ in 0..STEPS {
        let middle = ((&low + &high)? * 0.5)?;
        let chosen = scores.broadcast_ge(&middle)?.to_dtype(scores.dtype())?;
        let weights = match weight {
            Weight::Values => (scores * chosen)?,
            Weight::Count => chosen,
        };
        let reached = weights.sum_keepdim(D::Minus1)?.ge(wanted)?;
        low = reached.where_cond(&middle, &low)?;
        high = reached.where_cond(&high, &middle)?;
    }
    Ok(low)
}
