//! CUDA kernels of the selectors (feature `cuda`). A selector automatically uses them for tensors that they support.

mod block_pool;
mod exact_rows;
pub mod last_query_scores;
mod reorder;
mod rows;
mod strides;

pub use block_pool::block_pool;
pub use reorder::reorder_keys;
pub use rows::row_softmax;
pub use strides::{stride_shares, token_strides};

pub(crate) use exact_rows::exact_rows;
pub(crate) use rows::choose;

pub use crate::antidiagonal::StrideOrder;

use std::fmt::Display;

use candle_core::{DType, Tensor};
use s2o_cuda::CudaError;
use s2o_kernels::{Kernel, decoder};

/// Whether the kernels support the dtype (bf16 or f16) and the device (a GPU) of a tensor.
pub(crate) fn supports(x: &Tensor) -> bool {
    x.device().is_cuda() && matches!(x.dtype(), DType::BF16 | DType::F16)
}

/// Whether the kernels that copy heads support a tensor, whose last dimension is head_dim.
pub(crate) fn supports_copies(x: &Tensor) -> bool {
    supports(x) && x.dims().last().is_some_and(|dim| dim.is_multiple_of(decoder::VECTOR))
}

/// Whether the kernels that compute with heads support a tensor, whose last of 4 dimensions is head_dim.
pub(crate) fn supports_heads(x: &Tensor) -> bool {
    let head_dim = x.dims4().ok().and_then(|(_, _, _, head_dim)| Kernel::BlockPool.head_dim(head_dim));
    supports(x) && head_dim.is_some() && x.elem_count() > 0
}

/// Returns `x`, or a contiguous copy if the kernels cannot access its layout in place. Fails unless `x` has the dtype
/// `expected` and is on the device of `like`.
fn aligned(x: &Tensor, like: &Tensor, expected: DType) -> Result<Tensor, CudaError> {
    if x.dtype() != expected {
        let msg = "operand of a selection";
        return Err(candle_core::Error::UnexpectedDType { msg, expected, got: x.dtype() }.bt().into());
    }
    same_device(like, x)?;
    let in_place = x.is_contiguous() && x.layout().start_offset().is_multiple_of(decoder::VECTOR);
    Ok(if in_place { x.clone() } else { x.force_contiguous()? })
}

fn same_device(lhs: &Tensor, rhs: &Tensor) -> Result<(), CudaError> {
    if lhs.device().same_device(rhs.device()) {
        return Ok(());
    }
    let (lhs, rhs) = (lhs.device().location(), rhs.device().location());
    Err(candle_core::Error::DeviceMismatchBinaryOp { lhs, rhs, op: "selection" }.bt().into())
}

/// Refuses a head width that the kernels cannot copy in vectors.
fn check_vectors(head_dim: usize) -> Result<(), CudaError> {
    let fits = head_dim.is_multiple_of(decoder::VECTOR);
    check_size(fits, "head_dim", format_args!("a multiple of {}", decoder::VECTOR), head_dim)
}

/// Refuses a size unless it fits.
fn check_size(fits: bool, name: &'static str, expected: impl Display, got: usize) -> Result<(), CudaError> {
    if fits { Ok(()) } else { Err(CudaError::Size { name, expected: expected.to_string(), got }) }
}

/// The error for operands whose shapes do not fit each other.
fn shape_mismatch(lhs: &Tensor, rhs: &Tensor, op: &'static str) -> CudaError {
    let (lhs, rhs) = (lhs.shape().clone(), rhs.shape().clone());
    candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op }.bt().into()
}
