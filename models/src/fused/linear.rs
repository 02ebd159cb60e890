//! A linear layer whose weight may be quantised.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{DType, Module, Result, Tensor, bail};

use super::{Int8Linear, Rows};

/// Up to this number of rows the quantised weight itself is multiplied: its size is the time. For more rows it is
/// dequantised first, which one product over many rows hides.
pub(super) const FEW_ROWS: usize = 8;

/// The precision of the linear layers inside a decoder: all but embedding and output head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LinearPrecision {
    /// That of the weights as they were read.
    #[default]
    AsRead,
    /// Weights and inputs in 8-bit integers, rotated, with a scale for each output and each row. Only on NVIDIA GPUs of
    /// compute capability 9.0, from weights in bf16 or f16.
    Int8,
}

/// A linear layer `x W^T + b`.
#[derive(Debug, Clone)]
pub enum Linear {
    /// A weight in the dtype of its inputs.
    Dense(candle_nn::Linear),
    /// A weight `(size_out, size_in)` in quantised blocks along its rows, and a bias `(size_out,)`. Inputs of at most 8
    /// rows are rounded to 8 bits in blocks, as in llama.cpp. For more rows the weight is dequantised in each call.
    Quantised(Arc<QTensor>, Option<Tensor>),
    /// An 8-bit weight, whose inputs are quantised too.
    Int8(Int8Linear),
}

impl Linear {
    /// The output `(.., size_out)` for `x` `(.., size_in)`, in the dtype of `x`.
    ///
    /// # Errors
    /// Those of the matrix product.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_rows(&Rows::Plain(x.clone()))
    }

    /// [`Self::forward`] for inputs that may be quantised already, which only [`Self::Int8`] takes.
    ///
    /// # Errors
    /// Those of the matrix product, or if this layer takes no quantised inputs.
    pub fn forward_rows(&self, rows: &Rows) -> Result<Tensor> {
        match (self.for_inputs_like(rows)?.as_ref(), rows) {
            (Self::Int8(linear), rows) => linear.forward(rows),
            (_, Rows::Int8(_)) => bail!("expected inputs that are not quantised"),
            (Self::Dense(linear), Rows::Plain(x)) => linear.forward(x),
            (Self::Quantised(blocks, bias), Rows::Plain(x)) => {
                let product = x.contiguous()?.apply_op1_no_bwd(blocks.as_ref())?;
                match bias {
                    Some(bias) => product.broadcast_add(bias),
                    None => Ok(product),
                }
            }
        }
    }

    /// This layer in another precision; [`LinearPrecision::AsRead`] leaves it as it is.
    ///
    /// # Errors
    /// For [`LinearPrecision::Int8`] those of [`Int8Linear::new`], or if the weight is in quantised blocks.
    pub fn in_precision(self, precision: LinearPrecision) -> Result<Self> {
        match (precision, &self) {
            (LinearPrecision::Int8, Self::Dense(linear)) => Ok(Self::Int8(Int8Linear::new(linear)?)),
            (LinearPrecision::Int8, Self::Quantised(blocks, _)) => {
                bail!("int8: expected a weight in bf16 or f16, got {:?}", blocks.dtype())
            }
            _ => Ok(self),
        }
    }

    /// Whether inputs may be quantised by the step that computes them.
    pub(crate) fn takes_int8(&self) -> bool {
        matches!(self, Self::Int8(_))
    }

    /// This layer in the form that suits the number of rows of `x`.
    pub(crate) fn for_inputs_like(&self, x: &Rows) -> Result<Cow<'_, Self>> {
        match (self, x) {
            (Self::Quantised(blocks, bias), Rows::Plain(x)) if x.elem_count() > FEW_ROWS * blocks.shape().dims()[1] => {
                let weight = dequantise(blocks, x.dtype())?;
                Ok(Cow::Owned(Self::Dense(candle_nn::Linear::new(weight, bias.clone()))))
            }
            _ => Ok(Cow::Borrowed(self)),
        }
    }

    /// The layer of some outputs, in memory of its own.
    pub(crate) fn outputs(&self, range: Range<usize>) -> Result<Self> {
        let linear = self.divisible()?;
        let part = |x: &Tensor| x.narrow(0, range.start, range.len())?.force_contiguous();
        let (weight, bias) = (part(linear.weight())?, linear.bias().map(part).transpose()?);
        Ok(Self::Dense(candle_nn::Linear::new(weight, bias)))
    }

    /// The layer of some inputs, in memory of its own. The sum over all parts is the output of the layer, so only the
    /// first part has the bias.
    pub(crate) fn inputs(&self, range: Range<usize>) -> Result<Self> {
        let linear = self.divisible()?;
        let weight = linear.weight().narrow(1, range.start, range.len())?.force_contiguous()?;
        let bias = linear.bias().filter(|_| range.start == 0).cloned();
        Ok(Self::Dense(candle_nn::Linear::new(weight, bias)))
    }

    /// One layer of all outputs (dimension 0) or all inputs (1) of `parts`. Of parts of the inputs at most one has a bias.
    pub(crate) fn joined(mut parts: Vec<Self>, dim: usize) -> Result<Self> {
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let parts = parts.iter().map(Self::divisible).collect::<Result<Vec<_>>>()?;
        let weights: Vec<&Tensor> = parts.iter().map(|part| part.weight()).collect();
        let biases: Vec<&Tensor> = parts.iter().filter_map(|part| part.bias()).collect();
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        Ok(Self::Dense(candle_nn::Linear::new(Tensor::cat(&weights, dim)?, bias)))
    }

    fn divisible(&self) -> Result<&candle_nn::Linear> {
        match self.dense() {
            Some(linear) => Ok(linear),
            None => bail!("expected a weight that is not quantised, to take a part of it"),
        }
    }

    pub(super) fn dense(&self) -> Option<&candle_nn::Linear> {
        match self {
            Self::Dense(linear) => Some(linear),
            Self::Quantised(..) | Self::Int8(_) => None,
        }
    }

    /// Rows of the weight.
    pub(super) fn size_out(&self) -> Result<usize> {
        match self {
            Self::Dense(linear) => linear.weight().dim(0),
            Self::Quantised(blocks, _) => Ok(blocks.shape().dims()[0]),
            Self::Int8(linear) => linear.size_out(),
        }
    }
}

/// The values of `blocks` in `dtype`, on their device.
fn dequantise(blocks: &QTensor, dtype: DType) -> Result<Tensor> {
    let device = blocks.device();
    match dtype {
        // A step over f16 halves the memory traffic of one over f32.
        DType::F16 | DType::BF16 if device.is_cuda() => blocks.dequantize_f16(&device)?.to_dtype(dtype),
        _ => blocks.dequantize(&device)?.to_dtype(dtype),
    }
}
