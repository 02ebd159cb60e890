//! Softmax over the last dimension, with and without a mask.

use candle_core::Tensor;

use crate::error::BaselineError;

/// [`masked_softmax`] of the scores times `scale`, of all of them without a mask.
pub(crate) fn softmax_of_seen(scores: &Tensor, scale: f32, seen: Option<&Tensor>) -> Result<Tensor, BaselineError> {
    let scores = (scores * f64::from(scale))?;
    match seen {
        Some(seen) => masked_softmax(&scores, seen),
        None => Ok(candle_nn::ops::softmax_last_dim(&scores)?),
    }
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
