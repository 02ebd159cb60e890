//! [`AttnError`]: why an attention call on tensors was refused.

use candle_core::{DType, DeviceLocation};
use s2o_core::S2oError;
use thiserror::Error;

/// Why an attention call on tensors was refused. Converts into [`candle_core::Error`], so that `?` works in Candle
/// code.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttnError {
    /// Tensors must be (batch, length, heads, head_dim).
    #[error("{name}: expected 4 dimensions (batch, length, heads, head_dim), got {got:?}")]
    Rank {
        /// `q`, `k` or `v`.
        name: &'static str,
        /// Its dimensions.
        got: Vec<usize>,
    },
    /// The dtype is not supported.
    #[error("{name}: expected dtype F32, F16 or BF16, got {got:?}")]
    DType {
        /// `q`, `k` or `v`.
        name: &'static str,
        /// Its dtype.
        got: DType,
    },
    /// `k` and `v` must have the dtype of `q`.
    #[error("{name}: expected dtype {expected:?} as q, got {got:?}")]
    DTypeMismatch {
        /// `k` or `v`.
        name: &'static str,
        /// The dtype of `q`.
        expected: DType,
        /// Its dtype.
        got: DType,
    },
    /// A mask of blocks or of single keys is of bytes.
    #[error("{name}: expected dtype U8, got {got:?}")]
    MaskDType {
        /// `mask` or `columns`.
        name: &'static str,
        /// Its dtype.
        got: DType,
    },
    /// The kernels for this device are not part of this build.
    #[error("{name}: expected a tensor on the CPU, got {got}; S2O has no kernels for it in this build")]
    Device {
        /// `q`, `k` or `v`.
        name: &'static str,
        /// Its device.
        got: &'static str,
    },
    /// `k` and `v` must be on the device of `q`: made with the same `Device` value or a clone of it.
    #[error("{name}: expected the device of q ({expected:?}) or a clone of it, got {got:?}")]
    DeviceMismatch {
        /// `k`, `v`, or a mask of blocks or keys.
        name: &'static str,
        /// The device of `q`.
        expected: DeviceLocation,
        /// Its device.
        got: DeviceLocation,
    },
    /// What only a GPU does was asked of another device.
    #[cfg(feature = "cuda")]
    #[error("{what}: expected tensors on a CUDA device, got the CPU")]
    GpuOnly {
        /// What was asked for.
        what: &'static str,
    },
    /// The GPU refused the call or failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(s2o_cuda::CudaError),
    /// The sizes, the options or the workspace do not fit.
    #[error(transparent)]
    S2o(#[from] S2oError),
    /// Candle failed.
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
