//! Linear layers and norms from weights, with typed errors for missing tensors and wrong shapes.

use candle_core::Tensor;
use candle_nn::{Linear, VarBuilder};

use crate::error::{ModelError, Result};
use crate::fused;

pub(crate) fn load_tensor(shape: &[usize], name: &str, vb: &VarBuilder) -> Result<Tensor> {
    vb.get(shape, name).map_err(|error| ModelError::from_tensor_read(&format!("{}.{name}", vb.prefix()), error))
}

pub(crate) fn load_linear(size_in: usize, size_out: usize, bias: bool, vb: &VarBuilder) -> Result<Linear> {
    let weight = load_tensor(&[size_out, size_in], "weight", vb)?;
    let bias = if bias { Some(load_tensor(&[size_out], "bias", vb)?) } else { None };
    Ok(Linear::new(weight, bias))
}

/// RMS norm over the width of the residual stream.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    pub(crate) fn load(size: usize, eps: f64, vb: &VarBuilder) -> Result<Self> {
        Ok(Self { weight: load_tensor(&[size], "weight", vb)?, eps })
    }

    /// The sum of `x` and `delta` of the previous layer, and its norm.
    pub(crate) fn forward(&self, x: Tensor, delta: Option<Tensor>) -> Result<(Tensor, Tensor)> {
        match delta {
            Some(delta) => Ok(fused::add_rms_norm(x, &delta, &self.weight, self.eps)?),
            None => {
                let normed = fused::rms_norm(&x, &self.weight, self.eps)?;
                Ok((x, normed))
            }
        }
    }
}
