//! Linear layers in 8 bits: weights and inputs in e4m3, with a scale for each output and each row. Sums are in f32.

use candle_core::{D, DType, Device, Result, Tensor, bail};

#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

/// The inputs of a linear layer.
#[derive(Debug, Clone)]
pub enum Rows {
    /// `(.., width)` in f32, f16 or bf16.
    Plain(Tensor),
    /// Quantised by the step that computed them.
    E4m3(E4m3),
}

/// Rows of 8-bit floats with 4 bits of exponent and 3 of mantissa. The largest entry of a row is stored as 448, and each
/// row has a factor that restores it.
#[derive(Debug, Clone)]
pub struct E4m3 {
    /// The bits, `(.., width)` u8.
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
            Self::E4m3(x) => x.values.dims(),
        }
    }

    /// The same rows as `(rows, width)`.
    pub(crate) fn flat(&self) -> Result<Self> {
        let shape = ((), self.dims().last().copied().unwrap_or_default());
        Ok(match self {
            Self::Plain(x) => Self::Plain(x.reshape(shape)?),
            Self::E4m3(x) => Self::E4m3(E4m3 { values: x.values.reshape(shape)?, ..x.clone() }),
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
            Self::E4m3(x) => Self::E4m3(E4m3 {
                values: x.values.narrow(0, start, len)?,
                scales: x.scales.narrow(0, start, len)?,
                dtype: x.dtype,
            }),
        })
    }
}

impl E4m3 {
    /// Quantises `x` `(.., width)`, bf16 or f16, with a width that is a multiple of 16 and at most 32768.
    ///
    /// # Errors
    /// If `x` is not bf16 or f16 on a supported device ([`supports_e4m3`]), or the width does not fit.
    pub fn quantise(x: &Tensor) -> Result<Self> {
        check_width("width", x.dim(D::Minus1)?)?;
        #[cfg(feature = "cuda")]
        if supports_e4m3(x.device(), x.dtype()) {
            return Ok(cuda::quantise(&x.contiguous()?)?);
        }
        bail!("expected bf16 or f16 on {NEEDS}, got {:?} on {:?}", x.dtype(), x.device().location())
    }

    /// The bits, `(.., width)` u8.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// What the values of each row are multiplied with, `(rows,)` f32.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }
}

/// The devices of [`supports_e4m3`].
pub(crate) const NEEDS: &str =
    "an NVIDIA GPU of compute capability 9.0 (H100, H200), its build of the kernels and cuBLAS 12.9 or newer";
/// The widest rows that can be quantised: a thread block holds a row in its registers.
pub(crate) const MAX_WIDTH: usize = 32768;

/// Whether linear layers can be in e4m3: in bf16 and f16 on NVIDIA GPUs of compute capability 9.0, with cuBLAS 12.9 or
/// newer. On no other GPU cuBLASLt has scales for each row and column.
pub fn supports_e4m3(device: &Device, dtype: DType) -> bool {
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
        false => bail!("e4m3: expected a {what} that is a multiple of 16, got {got}"),
    }
}

/// A linear layer with an e4m3 weight.
#[derive(Debug, Clone)]
pub struct E4m3Linear {
    /// `(size_out, size_in)`, a scale for each output.
    weight: E4m3,
    bias: Option<Tensor>,
}

impl E4m3Linear {
    /// Quantises the weight of `linear`. Sizes are multiples of 16.
    ///
    /// # Errors
    /// As [`E4m3::quantise`].
    pub fn new(linear: &candle_nn::Linear) -> Result<Self> {
        check_width("number of outputs", linear.weight().dim(0)?)?;
        Ok(Self { weight: E4m3::quantise(linear.weight())?, bias: linear.bias().cloned() })
    }

    /// The output `(.., size_out)` for rows `(.., size_in)`, in their dtype. Up to eight rows are multiplied in their own
    /// dtype: reading the weight then takes nearly all the time.
    ///
    /// # Errors
    /// If the rows have another width or device.
    pub fn forward(&self, x: &Rows) -> Result<Tensor> {
        let (expected, got) = (self.size_in()?, x.dims().last().copied().unwrap_or_default());
        if got != expected {
            bail!("e4m3: expected rows of {expected}, got {:?}", x.dims())
        }
        let product = self.product(x)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }

    #[cfg(feature = "cuda")]
    fn product(&self, x: &Rows) -> Result<Tensor> {
        Ok(match x {
            Rows::E4m3(x) => cuda::product(x, &self.weight)?,
            Rows::Plain(x) if Self::keeps(x.elem_count() / self.size_in()?) => {
                cuda::few_rows(&x.contiguous()?, &self.weight)?
            }
            Rows::Plain(x) => cuda::product(&E4m3::quantise(x)?, &self.weight)?,
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn product(&self, _: &Rows) -> Result<Tensor> {
        bail!("e4m3: expected a build with the feature `cuda`")
    }

    /// Whether so many rows need not be quantised.
    pub(crate) fn keeps(rows: usize) -> bool {
        rows <= super::linear::FEW_ROWS
    }

    /// Rows of the weight.
    pub(crate) fn size_out(&self) -> Result<usize> {
        self.weight.values.dim(0)
    }

    fn size_in(&self) -> Result<usize> {
        self.weight.values.dim(1)
    }
}
