//! The cut between what is chosen of a row and what is not, found without sorting.

use candle_core::{D, Tensor};

use crate::selector::BaselineError;

/// For every row (last dimension) of `scores`, non-negative f32: the greatest value for which the choice of all entries
/// that are not less `reaches` what is wanted, within 2^-40 of the row's largest entry; 0 if none does. `reaches` takes
/// the choice (1 or 0, f32) and answers for every row with u8, the last dimension kept. Candle sorts only rows of up to
/// 1024 entries on a GPU, so this is how long rows are cut there.
pub(crate) fn greatest_threshold(
    scores: &Tensor,
    reaches: impl Fn(&Tensor) -> Result<Tensor, BaselineError>,
) -> Result<Tensor, BaselineError> {
    /// Halvings of (0, largest]: f32 has 24 bits of fraction, and the threshold may be 2^-16 of the largest.
    const STEPS: usize = 40;
    let mut high = (scores.max_keepdim(D::Minus1)? * 2.0)?;
    let mut low = high.zeros_like()?;
    for _ in 0..STEPS {
        let middle = ((&low + &high)? * 0.5)?;
        let reached = reaches(&scores.broadcast_ge(&middle)?.to_dtype(scores.dtype())?)?;
        low = reached.where_cond(&middle, &low)?;
        high = reached.where_cond(&high, &middle)?;
    }
    Ok(low)
}
