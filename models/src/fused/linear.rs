//! A linear layer whose weight may be quantised.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{DType, Module, Result, Tensor, bail};

/// Up to this number of rows the quantised weight itself is multiplied: its size is the time. For more rows it is
/// dequantised first, which one product over many rows hides.
const FEW_ROWS: usize = 8;

/// A linear layer `x W^T + b`.
#[derive(Debug, Clone)]
pub enum Linear {
    /// A weight in the dtype of its inputs.
    Dense(candle_nn::Linear),
    /// A weight `(size_out, size_in)` in quantised blocks along its rows, and a bias `(size_out,)`. Inputs of at most 8
    /// rows are rounded to 8 bits in blocks, as in llama.cpp. For more rows the weight is dequantised in each call.
    Quantised(Arc<QTensor>, Option<Tensor>),
}

impl Linear {
    /// The output `(.., size_out)` for `x` `(.., size_in)`, in the dtype of `x`.
    ///
    /// # Errors
    /// Those of the matrix product.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.for_inputs_like(x)?.as_ref() {
            Self::Dense(linear) => linear.forward(x),
            Self::Quantised(blocks, bias) => {
                let product = x.contiguous()?.apply_op1_no_bwd(blocks.as_ref())?;
                match bias {
                    Some(bias) => product.broadcast_add(bias),
                    None => Ok(product),
                }
            }
        }
    }

    /// This layer in the form that suits the number of rows of `x`.
    pub(crate) fn for_inputs_like(&self, x: &Tensor) -> Result<Cow<'_, Self>> {
        match self {
            Self::Quantised(blocks, bias) if x.elem_count() > FEW_ROWS * blocks.shape().dims()[1] => {
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

    fn divisible(&self) -> Result<&candle_nn::Linear> {
        match self.dense() {
            Some(linear) => Ok(linear),
            None => bail!("expected a weight that is not quantised, to take a part of it"),
        }
    }

    pub(super) fn dense(&self) -> Option<&candle_nn::Linear> {
        match self {
            Self::Dense(linear) => Some(linear),
            Self::Quantised(..) => None,
        }
    }

    /// Rows of the weight.
    pub(super) fn size_out(&self) -> Result<usize> {
        match self {
            Self::Dense(linear) => linear.weight().dim(0),
            Self::Quantised(blocks, _) => Ok(blocks.shape().dims()[0]),
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
