//! Linear layers, norms and the gated MLP from weights, with typed errors for missing tensors and wrong shapes.

use candle_core::Tensor;
use candle_nn::{Linear, Module, VarBuilder};

use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::fused::{self, StackedLinear};

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

/// Elements of one intermediate tensor on a CPU (three such tensors exist at once).
const ELEMENTS_ON_CPU: usize = 1 << 24;
/// Rows per slice on other devices: large matrix products need thousands.
const ROWS_ON_GPU: usize = 16384;

/// The gated MLP of one layer.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate_up: StackedLinear,
    down: Linear,
    rows_at_a_time: usize,
}

impl Mlp {
    pub(crate) fn load(config: &DecoderConfig, vb: &VarBuilder) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let projection = |name: &str| load_linear(hidden, inner, bias, &vb.pp(name));
        Ok(Self {
            gate_up: StackedLinear::new(vec![projection("gate_proj")?, projection("up_proj")?])?,
            down: load_linear(inner, hidden, bias, &vb.pp("down_proj"))?,
            rows_at_a_time: if vb.device().is_cpu() { (ELEMENTS_ON_CPU / inner).max(64) } else { ROWS_ON_GPU },
        })
    }

    /// Works in slices, because a whole prompt's intermediate is several times the residual stream.
    pub(crate) fn forward(&self, x: Tensor) -> Result<Tensor> {
        let (batch, len, hidden) = x.dims3()?;
        let rows = batch * len;
        let x = x.reshape((rows, hidden))?;
        let slice = |start: usize| -> Result<Tensor> {
            let gate_up = self.gate_up.forward(&x.narrow(0, start, self.rows_at_a_time.min(rows - start))?)?;
            // `silu_mul` consumes gate and up, so they are freed before the product with `down`.
            Ok(self.down.forward(&fused::silu_mul(gate_up)?)?)
        };
        let out = if rows <= self.rows_at_a_time {
            slice(0)?
        } else {
            Tensor::cat(&(0..rows).step_by(self.rows_at_a_time).map(slice).collect::<Result<Vec<_>>>()?, 0)?
        };
        Ok(out.reshape((batch, len, hidden))?)
    }
}
