//! RMS norms of the residual stream.

use candle_core::{Result, Tensor};
use candle_nn::ops;

use super::RotatedInt8;
#[cfg(feature = "cuda")]
use {
    super::{cuda, same_kind, supports, supports_int8},
    candle_core::{D, bail},
    s2o_kernels::decoder::{MAX_ROW_WIDTH, VECTOR},
};

/// RMS norm over the last dimension, times `weight`: `x / sqrt(mean(x^2) + eps) * weight`, in the shape and dtype of
/// `x`. f32, f16 or bf16, `weight` `(x's last dimension)` of the same dtype.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if norm_on_gpu(x, None, weight)? {
        return Ok(cuda::rms_norm(&x.contiguous()?, None, weight, eps as f32)?.1);
    }
    ops::rms_norm(&x.contiguous()?, weight, eps as f32)
}

/// The residual stream `x + delta`, and [`rms_norm`] of the rounded sum. `delta` has the shape and dtype of `x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn add_rms_norm(x: Tensor, delta: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if norm_on_gpu(&x, Some(delta), weight)? {
        let (x, delta) = (x.contiguous()?, delta.contiguous()?);
        return match cuda::rms_norm(&x, Some(&delta), weight, eps as f32)? {
            (Some(sum), normed) => Ok((sum, normed)),
            (None, _) => bail!("the kernel left no sum"),
        };
    }
    let sum = (x + delta)?;
    let normed = rms_norm(&sum, weight, eps)?;
    Ok((sum, normed))
}

/// The residual stream `x + delta` (`x` without a delta), and [`rms_norm`] of it, quantised.
///
/// # Errors
/// As [`add_rms_norm`] and [`RotatedInt8::quantise`].
pub fn rms_norm_int8(x: Tensor, delta: Option<&Tensor>, weight: &Tensor, eps: f64) -> Result<(Tensor, RotatedInt8)> {
    #[cfg(feature = "cuda")]
    if supports_int8(x.device(), x.dtype()) && norm_on_gpu(&x, delta, weight)? {
        let (x, delta) = (x.contiguous()?, delta.map(Tensor::contiguous).transpose()?);
        let (sum, normed) = cuda::rms_norm_int8(&x, delta.as_ref(), weight, eps as f32)?;
        return Ok((sum.unwrap_or(x), normed));
    }
    let (x, normed) = match delta {
        Some(delta) => add_rms_norm(x, delta, weight, eps)?,
        None => {
            let normed = rms_norm(&x, weight, eps)?;
            (x, normed)
        }
    };
    Ok((x, RotatedInt8::quantise(&normed)?))
}

/// Whether the kernel supports these tensors. If it does, their shapes are checked.
#[cfg(feature = "cuda")]
fn norm_on_gpu(x: &Tensor, delta: Option<&Tensor>, weight: &Tensor) -> Result<bool> {
    let width = x.dim(D::Minus1)?;
    let fits = width.is_multiple_of(VECTOR) && width <= MAX_ROW_WIDTH;
    if !supports(x.device(), x.dtype()) || !fits || x.elem_count() == 0 {
        return Ok(false);
    }
    if weight.dims() != [width] || !weight.is_contiguous() {
        bail!("rms norm: expected a weight of [{width}], got {:?}", weight.dims())
    }
    same_kind("rms norm", x, &[Some(weight), delta])?;
    match delta {
        Some(delta) if delta.dims() != x.dims() => bail!("rms norm: expected {:?}, got {:?}", x.dims(), delta.dims()),
        _ => Ok(true),
    }
}
