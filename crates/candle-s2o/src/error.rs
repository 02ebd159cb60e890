//! [`AttnError`]: the error of an attention call on tensors.

use candle_core::{DType, DeviceLocation};
use s2o_core::S2oError;
use thiserror::Error;

/// The error of an attention call on tensors. It converts into [`candle_core::Error`], so `?` works in Candle code.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum AttnError {
    /// Tensors must have 4 dimensions: (batch, length, heads, head_dim).
    #[error("{name}: expected 4 dimensions (batch, length, heads, head_dim), got {got:?}")]
    Rank { name: &'static str, got: Vec<usize> },
    /// The dtype is not supported.
    #[error("{name}: expected dtype F32, F16 or BF16, got {got:?}")]
    DType { name: &'static str, got: DType },
    /// `k` and `v` must have the dtype of `q`.
    #[error("{name}: expected dtype {expected:?} as q, got {got:?}")]
    DTypeMismatch { name: &'static str, expected: DType, got: DType },
    /// A mask of blocks or of single keys must have dtype U8.
    #[error("{name}: expected dtype U8, got {got:?}")]
    MaskDType { name: &'static str, got: DType },
    /// The kernels for this device are not part of this build.
    #[error("{name}: expected a tensor on the CPU, got {got}; S2O has no kernels for it in this build")]
    Device { name: &'static str, got: &'static str },
    /// `k`, `v` and masks must be on the device of `q`: created with the same `Device` value or a clone of it.
    #[error("{name}: expected the device of q ({expected:?}) or a clone of it, got {got:?}")]
    DeviceMismatch { name: &'static str, expected: DeviceLocation, got: DeviceLocation },
    /// Only a GPU supports the operation.
    #[cfg(feature = "cuda")]
    #[error("{what}: expected tensors on a CUDA device, got the CPU")]
    GpuOnly { what: &'static str },
    /// The GPU backend does not support the call, or a CUDA function failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(s2o_cuda::CudaError),
    /// The sizes, the options or the workspace do not fit.
    #[error(transparent)]
    S2o(#[from] S2oError),
    /// Candle returned an error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

#[cfg(feature = "cuda")]
impl From<s2o_cuda::CudaError> for AttnError {
    fn from(error: s2o_cuda::CudaError) -> Self {
        match error {
            s2o_cuda::CudaError::Candle(error) => Self::Candle(error),
            other => Self::Cuda(other),
        }
    }
}

impl From<AttnError> for candle_core::Error {
    fn from(error: AttnError) -> Self {
        match error {
            AttnError::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}
