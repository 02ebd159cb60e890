//! No GPU in this build: everything is left to Candle's operations.

use candle_core::Tensor;

use crate::error::BaselineError;

pub(crate) fn attention_by_key(_: &Tensor, _: &Tensor, _: f32, _: usize) -> Result<Option<Tensor>, BaselineError> {
    Ok(None)
}

pub(crate) fn attention_by_key_and_distance(
    _: &Tensor,
    _: &Tensor,
    _: f32,
    _: usize,
) -> Result<Option<[Tensor; 2]>, BaselineError> {
    Ok(None)
}

pub(crate) fn reorder_keys(_: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<[Tensor; 2]>, BaselineError> {
    Ok(None)
}

pub(crate) fn token_strides(_: &Tensor, _: usize, _: [usize; 2], _: bool) -> Result<Option<Tensor>, BaselineError> {
    Ok(None)
}

pub(crate) fn stride_shares(
    _: &Tensor,
    _: &Tensor,
    _: usize,
    _: usize,
    _: f32,
) -> Result<Option<Tensor>, BaselineError> {
    Ok(None)
}
