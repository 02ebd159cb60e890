//! Checks for tensors that the CUDA kernels support. Candle ops compute the others.

use candle_core::{DType, Device};
#[cfg(feature = "cuda")]
use candle_core::{Result, Tensor, bail};
#[cfg(feature = "cuda")]
use s2o_kernels::{HeadDim, decoder};

/// Whether this build has the kernels, and they support this dtype and device.
pub(crate) fn supports(device: &Device, dtype: DType) -> bool {
    cfg!(feature = "cuda") && device.is_cuda() && matches!(dtype, DType::BF16 | DType::F16)
}

/// Whether rows of this width can be normalised.
#[cfg(feature = "cuda")]
pub(super) fn supports_norm_width(width: usize) -> bool {
    width.is_multiple_of(decoder::VECTOR) && width <= decoder::MAX_NORM_WIDTH
}

/// Whether gates of this width can be multiplied.
#[cfg(feature = "cuda")]
pub(super) fn supports_silu_width(width: usize) -> bool {
    width.is_multiple_of(decoder::VECTOR)
}

/// Whether heads of this size can be rotated and attended to.
#[cfg(feature = "cuda")]
pub(crate) fn supports_head_dim(head_dim: usize) -> bool {
    HeadDim::new(head_dim).is_some()
}

/// Refuses tensors of another dtype or on another device.
#[cfg(feature = "cuda")]
pub(super) fn same_kind(what: &str, x: &Tensor, others: &[Option<&Tensor>]) -> Result<()> {
    for other in others.iter().flatten() {
        if other.dtype() != x.dtype() || !other.device().same_device(x.device()) {
            let kind = |tensor: &Tensor| format!("{:?} on {:?}", tensor.dtype(), tensor.device().location());
            bail!("{what}: expected tensors of {}, got {}", kind(x), kind(other))
        }
    }
    Ok(())
}
