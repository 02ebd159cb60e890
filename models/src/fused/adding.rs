//! Linear layers that add their outputs to a sum in its memory, so that the outputs are neither written nor read again.

use candle_core::{Result, Tensor, bail};

#[cfg(feature = "cuda")]
use super::products;
use super::{Int8Linear, Linear, Rows};

/// A linear layer without a bias, for sums on its device and in the dtype of its inputs ([`Linear::adding`]).
#[derive(Debug)]
pub enum Adding<'a> {
    /// A weight `(size_out, size_in)` in 16 bits on an NVIDIA GPU, multiplied by cuBLAS.
    Dense(&'a Tensor),
    /// A weight in 8 bits.
    Int8(&'a Int8Linear),
}

impl Linear {
    /// This layer, if it can add its outputs to `sum` `(.., size_out)` in place: without a bias, to a contiguous sum on an
    /// NVIDIA GPU. A layer in 16 bits does it for at least 128 rows: the outputs of fewer are no traffic worth saving.
    pub fn adding(&self, sum: &Tensor) -> Option<Adding<'_>> {
        if !sum.is_contiguous() {
            return None;
        }
        match self {
            Self::Int8(linear) if linear.adds() => Some(Adding::Int8(linear)),
            #[cfg(feature = "cuda")]
            Self::Dense(linear) if linear.bias().is_none() && products::adds(linear.weight(), sum) => {
                Some(Adding::Dense(linear.weight()))
            }
            _ => None,
        }
    }
}

impl Adding<'_> {
    /// Adds the output for `x` `(.., size_in)` to `sum` `(.., size_out)`, a contiguous part of the sum that the layer was
    /// chosen for. `x` is in other memory.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or those of the product.
    pub fn add_to(&self, x: &Rows, sum: &Tensor) -> Result<()> {
        match (self, x) {
            (Self::Int8(linear), x) => linear.add_to(x, sum),
            #[cfg(feature = "cuda")]
            (Self::Dense(weight), Rows::Plain(x)) => Ok(products::add(&x.contiguous()?, weight, sum)?),
            (Self::Dense(_), _) => bail!("expected inputs that are not quantised, and a build with the feature `cuda`"),
        }
    }
}
