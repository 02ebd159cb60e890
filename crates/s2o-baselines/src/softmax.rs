//! Softmax over the last dimension, with and without a mask.

use candle_core::Tensor;

use crate::error::BaselineError;

/// [`masked_softmax`] of the scores times `scale`; without a mask, of all entries.
pub(crate) fn softmax_of_seen(scores: &Tensor, scale: f32, seen: Option<&Tensor>) -> Result<Tensor, BaselineError> {
    let scores = (scores * f64::from(scale))?;
    match seen {
        Some(seen) => masked_softmax(&scores, seen),
        None => Ok(candle_nn::ops::softmax_last_dim(&scores)?),
    }
}

/// Softmax over the entries of the last dimension whose `mask`, broadcast over the leading dimensions, is not 0. The
/// other entries are 0, also in rows whose mask is all 0.
pub(crate) fn masked_softmax(scores: &Tensor, mask: &Tensor) -> Result<Tensor, BaselineError> {
    let shape = scores.shape();
    let mask = mask.broadcast_as(shape)?;
    let fill = |value: f32| Tensor::new(value, scores.device())?.broadcast_as(shape);
    // Finite, so that a row without any entry gives no NaN.
    let visible = mask.where_cond(scores, &fill(f32::MIN)?)?;
    Ok(mask.where_cond(&candle_nn::ops::softmax_last_dim(&visible)?, &fill(0.0)?)?)
}
