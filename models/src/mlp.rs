//! The gated MLP of one layer.

use candle_core::Tensor;
use candle_nn::{Linear, Module, VarBuilder};

use crate::config::DecoderConfig;
use crate::error::Result;
use crate::fused::{self, StackedLinear};
use crate::layers::load_linear;

/// Elements of one intermediate tensor on a CPU (three such tensors exist at once).
const ELEMENTS_ON_CPU: usize = 1 << 24;
/// Rows per slice on other devices: large matrix products need thousands.
const ROWS_ON_GPU: usize = 16384;

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
