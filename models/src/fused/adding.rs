//! Linear layers that add their outputs to a sum in its memory, so that the outputs are neither written nor read again.

use candle_core::{DType, Device, Result, Tensor, bail};

#[cfg(feature = "cuda")]
use super::products;
use super::{Int8Linear, Linear, Rows};

/// A linear layer without a bias that can add its outputs to sums on its device, in the dtype of its inputs
/// ([`Linear::adding`]).
#[derive(Debug)]
pub struct Adding<'a>(Weight<'a>);

#[derive(Debug)]
enum Weight<'a> {
    /// `(size_out, size_in)` in 16 bits on an NVIDIA GPU, multiplied by cuBLAS.
    #[cfg(feature = "cuda")]
    Dense(&'a Tensor),
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
            Self::Int8(linear) if linear.adds() => Some(Adding(Weight::Int8(linear))),
            #[cfg(feature = "cuda")]
            Self::Dense(linear) if linear.bias().is_none() && products::adds(linear.weight(), sum) => {
                Some(Adding(Weight::Dense(linear.weight())))
            }
            _ => None,
        }
    }
}

impl Adding<'_> {
    /// Adds the output for `x` `(.., size_in)` to `sum` `(.., size_out)`, a contiguous part of the sum that the layer was
    /// chosen for. `x` must be in other memory than `sum`: Candle locks memory that is written, so the call would not return.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or those of the product.
    pub fn add_to(&self, x: &Rows, sum: &Tensor) -> Result<()> {
        match (&self.0, x) {
            (Weight::Int8(linear), x) => linear.add_to(x, sum),
            #[cfg(feature = "cuda")]
            (Weight::Dense(weight), Rows::Plain(plain)) => {
                check_sums(x, sum, weight.dims2()?, weight.dtype(), weight.device())?;
                Ok(products::add(&plain.contiguous()?, weight, sum)?)
            }
            #[cfg(feature = "cuda")]
            (Weight::Dense(_), Rows::Int8(_)) => bail!("expected inputs that are not quantised"),
        }
    }
}

/// Refuses inputs and sums that are not of this dtype and device, or do not fit a weight of these sizes or each other.
pub(super) fn check_sums(
    x: &Rows,
    sum: &Tensor,
    (size_out, size_in): (usize, usize),
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let fits = match (x.dims(), sum.dims()) {
        ([rows @ .., width], [sums @ .., outputs]) => rows == sums && (*outputs, *width) == (size_out, size_in),
        _ => false,
    };
    let is_of_kind =
        [x.dtype(), sum.dtype()] == [dtype; 2] && [x.device(), sum.device()].iter().all(|on| on.same_device(device));
    if fits && is_of_kind && sum.is_contiguous() {
        return Ok(());
    }
    let on = |device: &Device| format!("on {:?}", device.location());
    bail!(
        "expected rows (.., {size_in}) and as many contiguous sums (.., {size_out}) in {dtype:?} {}, got {:?} in {:?} {} and {:?} \
         in {:?} {}",
        on(device),
        x.dims(),
        x.dtype(),
        on(x.device()),
        sum.layout(),
        sum.dtype(),
        on(sum.device()),
    )
}
