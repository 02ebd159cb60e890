//! Linear layers on one input, and the gate of an MLP on their outputs.

use candle_core::{D, Module, Result, Tensor, bail};
use candle_nn::Linear;

#[cfg(feature = "cuda")]
use super::cuda;
use super::supports;

/// Linear layers on one input. On a GPU their weights are stacked, and one matrix product computes all outputs. On a
/// CPU they stay separate, because the next steps need contiguous outputs.
#[derive(Debug, Clone)]
pub struct StackedLinear {
    /// One layer for all outputs, or one layer per output.
    layers: Vec<Linear>,
    sizes: Vec<usize>,
}

impl StackedLinear {
    /// Takes layers `(size, size_in)` of one input; all or none of them have a bias. If the weights are joined, both
    /// copies are held until this returns.
    ///
    /// # Errors
    /// If there are no layers, only some have a bias, or their input sizes, dtypes or devices differ.
    pub fn new(layers: Vec<Linear>) -> Result<Self> {
        let Some(first) = layers.first().map(Linear::weight) else { bail!("expected at least one linear layer") };
        let sizes = layers.iter().map(|layer| layer.weight().dim(0)).collect::<Result<Vec<_>>>()?;
        if !supports(first.device(), first.dtype()) {
            return Ok(Self { layers, sizes });
        }
        let weights: Vec<&Tensor> = layers.iter().map(Linear::weight).collect();
        let biases: Vec<&Tensor> = layers.iter().filter_map(Linear::bias).collect();
        let bias = match biases.len() {
            0 => None,
            count if count == layers.len() => Some(Tensor::cat(&biases, 0)?),
            count => bail!("expected biases of all {} layers or of none, got {count}", layers.len()),
        };
        Ok(Self { layers: vec![Linear::new(Tensor::cat(&weights, 0)?, bias)], sizes })
    }

    /// The outputs of all layers for `x` `(.., size_in)`.
    ///
    /// # Errors
    /// Those of the matrix product.
    pub fn forward(&self, x: &Tensor) -> Result<Stacked> {
        let outputs = self.layers.iter().map(|layer| layer.forward(x)).collect::<Result<_>>()?;
        Ok(Stacked { outputs, sizes: self.sizes.clone() })
    }
}

/// The outputs of the layers of a [`StackedLinear`], joined or separate.
#[derive(Debug, Clone)]
pub struct Stacked {
    outputs: Vec<Tensor>,
    sizes: Vec<usize>,
}

impl Stacked {
    /// Wraps outputs that are one tensor `(.., sum of sizes)`.
    ///
    /// # Errors
    /// If the sizes do not add up to the last dimension.
    pub fn joined(output: Tensor, sizes: &[usize]) -> Result<Self> {
        if output.dim(D::Minus1)? != sizes.iter().sum::<usize>() {
            bail!("expected a last dimension of {sizes:?} together, got {:?}", output.dims())
        }
        Ok(Self { outputs: vec![output], sizes: sizes.to_vec() })
    }

    /// Each output, contiguous: `(.., size)`.
    ///
    /// # Errors
    /// Candle's error if memory runs out.
    pub fn into_parts(self) -> Result<Vec<Tensor>> {
        if self.outputs.len() == self.sizes.len() {
            return Ok(self.outputs);
        }
        let mut start = 0;
        let part = |&size: &usize| {
            start += size;
            self.outputs[0].narrow(D::Minus1, start - size, size)?.contiguous()
        };
        self.sizes.iter().map(part).collect()
    }

    /// Refuses a number of outputs other than `count`.
    pub(super) fn expect(&self, count: usize) -> Result<()> {
        if self.sizes.len() == count {
            return Ok(());
        }
        bail!("expected {count} stacked outputs, got {}", self.sizes.len())
    }

    /// The tensor that holds all outputs, if they are joined and the kernels support it.
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(&self) -> Option<&Tensor> {
        match self.outputs.as_slice() {
            [joined] if self.sizes.len() > 1 && supports(joined.device(), joined.dtype()) => Some(joined),
            _ => None,
        }
    }
}

/// `silu(gate) * up` of the stacked outputs gate and up, each `(.., size)`: the inside of a gated MLP.
///
/// # Errors
/// If there are not two outputs of one size.
pub fn silu_mul(gate_up: Stacked) -> Result<Tensor> {
    gate_up.expect(2)?;
    #[cfg(feature = "cuda")]
    if let Some(joined) = gate_up.on_gpu()
        && gate_up.sizes[0] == gate_up.sizes[1]
        && gate_up.sizes[0].is_multiple_of(s2o_kernels::decoder::VECTOR)
        && joined.elem_count() > 0
    {
        return Ok(cuda::silu_mul(&joined.contiguous()?)?);
    }
    let parts = gate_up.into_parts()?;
    parts[0].silu()? * &parts[1]
}
