//! Linear layers on one input, and the gate of an MLP on their outputs.

use std::borrow::Cow;

use candle_core::{D, Result, Tensor, bail};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Linear, LinearPrecision, Rows, supports};

/// Linear layers on one input. On a GPU their weights are stacked unless they are quantised, and one matrix product
/// computes all outputs. On a CPU they stay separate, because the next steps need contiguous outputs.
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
        if layers.is_empty() {
            bail!("expected at least one linear layer")
        }
        let sizes = layers.iter().map(Linear::size_out).collect::<Result<Vec<_>>>()?;
        let dense: Vec<&candle_nn::Linear> = layers.iter().filter_map(Linear::dense).collect();
        let weights: Vec<&Tensor> = dense.iter().map(|layer| layer.weight()).collect();
        if weights.len() < layers.len() || !supports(weights[0].device(), weights[0].dtype()) {
            return Ok(Self { layers, sizes });
        }
        let biases: Vec<&Tensor> = dense.iter().filter_map(|layer| layer.bias()).collect();
        let bias = match biases.len() {
            0 => None,
            count if count == layers.len() => Some(Tensor::cat(&biases, 0)?),
            count => bail!("expected biases of all {} layers or of none, got {count}", layers.len()),
        };
        Ok(Self { layers: vec![Linear::Dense(candle_nn::Linear::new(Tensor::cat(&weights, 0)?, bias))], sizes })
    }

    /// These layers in another precision; [`LinearPrecision::AsRead`] leaves them as they are.
    ///
    /// # Errors
    /// As [`Linear::in_precision`].
    pub fn in_precision(self, precision: LinearPrecision) -> Result<Self> {
        let layers = self.layers.into_iter().map(|layer| layer.in_precision(precision));
        Ok(Self { layers: layers.collect::<Result<_>>()?, sizes: self.sizes })
    }

    /// Whether inputs may be quantised by the step that computes them.
    pub(crate) fn takes_int8(&self) -> bool {
        self.layers.iter().all(Linear::takes_int8)
    }

    /// The joined weight of two layers of one size without biases, on a device whose kernels support it.
    #[cfg(feature = "cuda")]
    pub(super) fn joined_halves(&self) -> Option<&Tensor> {
        match (self.layers.as_slice(), self.sizes.as_slice()) {
            ([Linear::Dense(joined)], [first, second]) if first == second && joined.bias().is_none() => {
                Some(joined.weight())
            }
            _ => None,
        }
    }

    /// The outputs of all layers for `x` `(.., size_in)`.
    ///
    /// # Errors
    /// Those of the matrix product.
    pub fn forward(&self, x: &Rows) -> Result<Stacked> {
        let layers = &self.for_inputs_like(x)?.layers;
        let outputs = layers.iter().map(|layer| layer.forward_rows(x)).collect::<Result<Vec<_>>>()?;
        if outputs.len() > 1 && supports(outputs[0].device(), outputs[0].dtype()) {
            return Stacked::joined(Tensor::cat(&outputs, D::Minus1)?, &self.sizes);
        }
        Ok(Stacked { outputs, sizes: self.sizes.clone() })
    }

    /// These layers in the form that suits the number of rows of `x`: quantised weights are dequantised for many rows.
    pub(crate) fn for_inputs_like(&self, x: &Rows) -> Result<Cow<'_, Self>> {
        let layers = self.layers.iter().map(|layer| layer.for_inputs_like(x)).collect::<Result<Vec<_>>>()?;
        match layers.iter().any(|layer| matches!(layer, Cow::Owned(_))) {
            true => Ok(Cow::Owned(Self::new(layers.into_iter().map(Cow::into_owned).collect())?)),
            false => Ok(Cow::Borrowed(self)),
        }
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

    /// All outputs side by side: `(.., sum of sizes)`.
    pub(crate) fn into_joined(mut self) -> Result<Tensor> {
        match self.outputs.len() {
            1 => Ok(self.outputs.remove(0)),
            _ => Tensor::cat(&self.outputs, D::Minus1),
        }
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

    /// The tensor that holds gate and up, if a kernel can multiply them.
    #[cfg(feature = "cuda")]
    fn gated_on_gpu(&self) -> Option<&Tensor> {
        let fits = self.sizes.len() == 2
            && self.sizes[0] == self.sizes[1]
            && self.sizes[0].is_multiple_of(s2o_kernels::decoder::VECTOR);
        self.on_gpu().filter(|joined| fits && joined.elem_count() > 0)
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
    if let Some(joined) = gate_up.gated_on_gpu() {
        return Ok(cuda::silu_mul(&joined.contiguous()?)?);
    }
    let parts = gate_up.into_parts()?;
    parts[0].silu()? * &parts[1]
}
