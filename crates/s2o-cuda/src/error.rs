//! [`CudaError`]: why a call on a GPU was refused or failed.

use candle_core::DType;
use cudarc::driver::DriverError;
use s2o_kernels::{Arch, HeadDim, Kernel};
use thiserror::Error;

/// Why a call on a GPU was refused or failed. The CPU path covers calls that the kernels do not: move the tensors with
/// `to_device(&Device::Cpu)`.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum CudaError {
    /// The kernels compute on 16-bit elements.
    #[error("{name}: expected dtype F16 or BF16 on CUDA, got {got:?}; the CPU path takes F32")]
    DType { name: &'static str, got: DType },
    /// The kernels are built for a few head sizes.
    #[error("head_dim: expected {expected} on CUDA, got {got}; the CPU path takes multiples of 8 up to 256")]
    HeadDim { expected: String, got: usize },
    /// A block of the kernel needs more shared memory than the GPU has.
    #[error(
        "expected a GPU with {expected} bytes of shared memory for a block of {name}, got one with {got}; the CPU path \
         runs everywhere"
    )]
    SharedMemory { name: String, expected: usize, got: usize },
    /// The kernels are built for one tile size.
    #[error("{name}: expected 128 on CUDA, got {got}; the CPU path takes others")]
    Tile { name: &'static str, got: usize },
    /// The kernels keep the maximum of unscaled scores.
    #[error("softmax_scale: expected a positive number on CUDA, got {got}; the CPU path takes any finite one")]
    SoftmaxScale { got: f32 },
    /// The queries of a segment do not fit in shared memory, where they are ordered.
    #[error("segment: expected at most {max} with q-perm on this GPU, got {got}")]
    PermutedSegment { max: usize, got: usize },
    /// The kernels count in 32 bits.
    #[error("{name}: expected at most {max} on CUDA, got {got}; split the batch or the heads over several calls")]
    TooLarge { name: &'static str, max: usize, got: usize },
    /// The GPU is too old.
    #[error("expected a GPU of compute capability 8.0 or newer, got {major}.{minor}; the CPU path runs everywhere")]
    ComputeCapability { major: i32, minor: i32 },
    /// `S2O_CUDA_ARCH` names no build of the kernels.
    #[error("S2O_CUDA_ARCH: expected sm80 or sm90a, got {0:?}")]
    UnknownArch(String),
    /// `S2O_CUDA_ARCH` names a build that this GPU cannot run.
    #[error("S2O_CUDA_ARCH={arch}: expected a build for compute capability {major}.{minor}")]
    ArchMismatch { arch: Arch, major: i32, minor: i32 },
    /// The driver refused compiled code. It reports its version 13.0 as 13000.
    #[error(
        "loading the kernels of {module}: {source:?}; the driver supports CUDA {}.{}: if the kernels were built with a \
         newer toolkit, install a newer driver or build with that toolkit",
        .driver_version / 1000, .driver_version % 1000 / 10
    )]
    Load { module: &'static str, driver_version: i32, source: DriverError },
    /// A kernel is not in this build.
    #[error("expected kernel {name} in the build for {arch}, found none")]
    MissingKernel { name: String, arch: Arch },
    /// A stream that records a CUDA graph cannot be waited for.
    #[error("{doing} needs the host to wait for the GPU, but the stream is capturing a graph; {instead}")]
    Capturing { doing: &'static str, instead: &'static str },
    /// An option that only the CPU path supports.
    #[error("expected no {what} on CUDA; the CPU path takes them")]
    CpuOnly { what: &'static str },
    /// A size or a count does not fit the call.
    #[error("{name}: expected {expected}, got {got}")]
    Size { name: &'static str, expected: String, got: usize },
    /// A tensor is not on the GPU.
    #[error("expected all tensors on one GPU, got one elsewhere")]
    NotOnGpu,
    /// The driver failed.
    #[error("{doing}: {source:?}")]
    Driver { doing: &'static str, source: DriverError },
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<CudaError> for candle_core::Error {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}

/// Adds the failed operation to an error of the driver.
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, CudaError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, doing: &'static str) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::Driver { doing, source })
    }
}

/// The head size of the functions of `kernel` for heads of `got` elements, or [`CudaError::HeadDim`].
pub fn head_dim(kernel: Kernel, got: usize) -> Result<HeadDim, CudaError> {
    kernel.head_dim(got).ok_or_else(|| {
        let sizes: Vec<String> = kernel.head_dims().iter().map(|size| size.get().to_string()).collect();
        CudaError::HeadDim { expected: sizes.join(" or "), got }
    })
}

/// Converts a size to the 32-bit number that kernels count with, or returns [`CudaError::TooLarge`].
pub fn to_i32(name: &'static str, got: usize) -> Result<i32, CudaError> {
    i32::try_from(got).map_err(|_| CudaError::TooLarge { name, max: i32::MAX as usize, got })
}

/// Refuses a size that kernels cannot count in 32 bits, with [`CudaError::TooLarge`].
pub fn check_i32(name: &'static str, got: usize) -> Result<(), CudaError> {
    to_i32(name, got).map(drop)
}
