//! Linear layers in 8 bits: weights and inputs in 8-bit integers, with a scale for each output and each row, after a
//! rotation of both. Sums are in 32-bit integers, so they are exact.
//!
//! Large entries of a row determine its scale, and the others would have few steps. So each block of 64 entries (fewer,
//! if 64 does not divide the width) is first multiplied with a Hadamard matrix, which spreads them. The matrix is
//! orthogonal, so the product of a rotated input and a rotated weight is that of input and weight (QuaRot, arXiv
//! 2404.00456, which rotates whole rows).

use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::adding::check_sums;

#[cfg(feature = "cuda")]
pub(super) mod cuda;

/// The inputs of a linear layer.
#[derive(Debug, Clone)]
pub enum Rows {
    /// `(.., width)` in f32, f16 or bf16.
    Plain(Tensor),
    /// Quantised by the step that computed them.
    Int8(RotatedInt8),
}

/// Rotated rows in 8-bit integers. The largest entry of a rotated row is stored as 127 or -127, and each row has a factor
/// that restores it.
#[derive(Debug, Clone)]
pub struct RotatedInt8 {
    /// Integers in two's complement, `(.., width)` u8.
    values: Tensor,
    /// The factors, `(rows,)` f32.
    scales: Tensor,
    /// Dtype of what was quantised, and of products.
    dtype: DType,
}

impl From<Tensor> for Rows {
    fn from(x: Tensor) -> Self {
        Self::Plain(x)
    }
}

impl Rows {
    /// The shape, `(.., width)`.
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Plain(x) => x.dims(),
            Self::Int8(x) => x.values.dims(),
        }
    }

    /// That of what was quantised.
    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::Plain(x) => x.dtype(),
            Self::Int8(x) => x.dtype,
        }
    }

    pub(super) fn device(&self) -> &Device {
        match self {
            Self::Plain(x) => x.device(),
            Self::Int8(x) => x.values.device(),
        }
    }

    /// The same rows as `(rows, width)`.
    pub(crate) fn flat(&self) -> Result<Self> {
        let shape = ((), self.dims().last().copied().unwrap_or_default());
        Ok(match self {
            Self::Plain(x) => Self::Plain(x.reshape(shape)?),
            Self::Int8(x) => Self::Int8(RotatedInt8 { values: x.values.reshape(shape)?, ..x.clone() }),
        })
    }

    /// `len` rows of `(rows, width)` from `start` on.
    ///
    /// # Errors
    /// If there are fewer rows, or more than two dimensions.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        if self.dims().len() != 2 {
            bail!("expected rows (rows, width), got {:?}", self.dims())
        }
        Ok(match self {
            Self::Plain(x) => Self::Plain(x.narrow(0, start, len)?),
            Self::Int8(x) => Self::Int8(RotatedInt8 {
                values: x.values.narrow(0, start, len)?,
                scales: x.scales.narrow(0, start, len)?,
                dtype: x.dtype,
            }),
        })
    }
}

impl RotatedInt8 {
    /// Rotates and quantises `x` `(.., width)`, bf16 or f16, with a width that is a multiple of 16 and at most 32768.
    ///
    /// # Errors
    /// If `x` is not bf16 or f16 on a supported device ([`supports_int8`]), or the width does not fit.
    pub fn quantise(x: &Tensor) -> Result<Self> {
        check_width("width", x.dim(D::Minus1)?)?;
        #[cfg(feature = "cuda")]
        if supports_int8(x.device(), x.dtype()) {
            return Ok(cuda::quantise(&x.contiguous()?)?);
        }
        bail!("expected bf16 or f16 on {NEEDS}, got {:?} on {:?}", x.dtype(), x.device().location())
    }

    /// Integers from -127 to 127 in two's complement, `(.., width)` u8.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// What the values of each row are multiplied with, `(rows,)` f32.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }
}

/// The devices of [`supports_int8`].
pub(crate) const NEEDS: &str = "an NVIDIA GPU of compute capability 9.0 (H100, H200) and its build of the kernels";
/// The widest rows that can be quantised: a thread block holds a row in its registers.
pub(crate) const MAX_WIDTH: usize = 32768;

/// Whether linear layers can be in int8: in bf16 and f16 on NVIDIA GPUs of compute capability 9.0.
pub fn supports_int8(device: &Device, dtype: DType) -> bool {
    #[cfg(feature = "cuda")]
    return super::supports(device, dtype) && cuda::is_supported(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (device, dtype);
        false
    }
}

/// Refuses sizes that the matrix products do not take.
fn check_width(what: &str, got: usize) -> Result<()> {
    match got.is_multiple_of(16) {
        true => Ok(()),
        false => bail!("int8: expected a {what} that is a multiple of 16, got {got}"),
    }
}

/// A weight, quantised when this returns: products read their weight before they wait for the kernels before them.
fn complete(weight: &Tensor) -> Result<RotatedInt8> {
    let quantised = RotatedInt8::quantise(weight)?;
    weight.device().synchronize()?;
    Ok(quantised)
}

/// A linear layer with a rotated int8 weight.
#[derive(Debug, Clone)]
pub struct Int8Linear {
    /// `(size_out, size_in)`, or `(2 size_out, size_in)` with a gate; a scale for each row.
    weight: RotatedInt8,
    bias: Option<Tensor>,
    /// Whether the outputs are gates and then ups, and the result is their gated product.
    is_gated: bool,
}

impl Int8Linear {
    /// Rotates and quantises the weight of `linear`. Sizes are multiples of 16.
    ///
    /// # Errors
    /// As [`RotatedInt8::quantise`].
    pub fn new(linear: &candle_nn::Linear) -> Result<Self> {
        check_width("number of outputs", linear.weight().dim(0)?)?;
        Ok(Self { weight: complete(linear.weight())?, bias: linear.bias().cloned(), is_gated: false })
    }

    /// The layer whose output is `silu(x gate^T) * (x up^T)`, for weights `(size, size_in)`. Sizes are multiples of 16.
    ///
    /// # Errors
    /// As [`Self::new`], or if the weights have different shapes.
    pub fn gated(gate: &Tensor, up: &Tensor) -> Result<Self> {
        if gate.dims2()? != up.dims2()? {
            bail!("int8: expected gate and up of one shape, got {:?} and {:?}", gate.dims(), up.dims())
        }
        check_width("number of outputs", gate.dim(0)?)?;
        let weight = Tensor::cat(&[gate, up], 0)?;
        Ok(Self { weight: complete(&weight)?, bias: None, is_gated: true })
    }

    /// The output `(.., size_out)` for rows `(.., size_in)`, in their dtype. A row's output does not depend on the others.
    ///
    /// # Errors
    /// If the rows have another width or device.
    pub fn forward(&self, x: &Rows) -> Result<Tensor> {
        let (expected, got) = (self.size_in()?, x.dims().last().copied().unwrap_or_default());
        if got != expected {
            bail!("int8: expected rows of {expected}, got {:?}", x.dims())
        }
        let product = self.product(x)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }

    /// Whether [`Self::add_to`] may be called: the layer has neither bias nor gate.
    pub fn adds(&self) -> bool {
        self.bias.is_none() && !self.is_gated
    }

    /// Adds the output for `x` `(.., size_in)` to `sum` `(.., size_out)` in place: as the sum of `sum` and [`Self::forward`],
    /// bit for bit. `sum` has the dtype of the rows, is contiguous and begins at a multiple of 8 elements.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or the layer has a bias or a gate.
    pub fn add_to(&self, x: &Rows, sum: &Tensor) -> Result<()> {
        if !self.adds() {
            bail!("int8: expected a layer without bias and gate")
        }
        check_sums(x, sum, (self.size_out()?, self.size_in()?), x.dtype(), self.weight.values.device())?;
        if !sum.layout().start_offset().is_multiple_of(8) {
            bail!("int8: expected sums from a multiple of 8 elements on, got {:?}", sum.layout())
        }
        self.add_product(x, sum)
    }

    #[cfg(feature = "cuda")]
    fn add_product(&self, x: &Rows, sum: &Tensor) -> Result<()> {
        match x {
            Rows::Int8(x) => cuda::add_product(x, self, sum)?,
            Rows::Plain(x) => cuda::add_product(&RotatedInt8::quantise(x)?, self, sum)?,
        }
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    fn add_product(&self, _: &Rows, _: &Tensor) -> Result<()> {
        bail!("int8: expected a build with the feature `cuda`")
    }

    #[cfg(feature = "cuda")]
    fn product(&self, x: &Rows) -> Result<Tensor> {
        Ok(match x {
            Rows::Int8(x) => cuda::product(x, self)?,
            Rows::Plain(x) => cuda::product(&RotatedInt8::quantise(x)?, self)?,
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn product(&self, _: &Rows) -> Result<Tensor> {
        bail!("int8: expected a build with the feature `cuda`")
    }

    pub(crate) fn size_out(&self) -> Result<usize> {
        let rows = self.weight.values.dim(0)?;
        Ok(if self.is_gated { rows / 2 } else { rows })
    }

    fn size_in(&self) -> Result<usize> {
        self.weight.values.dim(1)
    }
}
