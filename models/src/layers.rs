//! Linear layers and norms from weights, with typed errors for what is missing or misshapen.

use candle_core::Tensor;
use candle_nn::{Linear, RmsNorm, VarBuilder};

use crate::error::{ModelError, Result};

pub(crate) fn load_tensor(shape: &[usize], name: &str, vb: &VarBuilder) -> Result<Tensor> {
    vb.get(shape, name).map_err(|error| ModelError::from_tensor_read(&format!("{}.{name}", vb.prefix()), error))
}

pub(crate) fn load_linear(size_in: usize, size_out: usize, bias: bool, vb: &VarBuilder) -> Result<Linear> {
    let weight = load_tensor(&[size_out, size_in], "weight", vb)?;
    let bias = if bias { Some(load_tensor(&[size_out], "bias", vb)?) } else { None };
    Ok(Linear::new(weight, bias))
}

pub(crate) fn load_norm(size: usize, eps: f64, vb: &VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(load_tensor(&[size], "weight", vb)?, eps))
}
