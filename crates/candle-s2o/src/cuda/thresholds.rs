//! Launch of the kernel that cuts rows.

use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{D, DType, Tensor};
use s2o_kernels::params::RowThresholdParams;
use s2o_kernels::{Dtype, Function, Kernel};

use super::fused::{ANY_HEAD_DIM, Launcher, address, tensor};
use crate::error::AttnError;

/// Rows that blocks of this many threads keep in registers; longer rows get larger blocks.
const SHORT: (usize, usize) = (4096, 256);

/// What the chosen entries of a row add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowWeight {
    /// Their values.
    Values,
    /// Their number.
    Count,
}

/// For every row (last dimension) of `scores`, non-negative f32 on a GPU: the greatest value for which all entries that are
/// not less add up to what is `wanted` of the row, within 2^-40 of the row's largest entry; 0 if none does. `wanted` is
/// f32 of the same shape with a last dimension of 1, and so is the result. Candle sorts only rows of up to 1024 entries
/// on a GPU; this is how top-k and top-p cut longer ones.
///
/// # Errors
/// If the tensors are not such, or the GPU fails.
pub fn row_thresholds(scores: &Tensor, wanted: &Tensor, weight: RowWeight) -> Result<Tensor, AttnError> {
    let row_len = scores.dim(D::Minus1)?;
    let rows = scores.elem_count() / row_len.max(1);
    if wanted.dim(D::Minus1)? != 1 || wanted.elem_count() != rows || row_len == 0 {
        let (lhs, rhs) = (scores.shape().clone(), wanted.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: "row-thresholds" }.bt().into());
    }
    for (msg, tensor) in [("scores of row_thresholds", scores), ("wanted of row_thresholds", wanted)] {
        if tensor.dtype() != DType::F32 {
            let got = tensor.dtype();
            return Err(candle_core::Error::UnexpectedDType { msg, expected: DType::F32, got }.bt().into());
        }
    }
    let (scores, wanted) = (scores.contiguous()?, wanted.contiguous()?);
    let launcher = Launcher::of(&scores)?;
    let stream = &launcher.stream;
    let mut thresholds = launcher.uninit::<f32>(wanted.shape())?;
    {
        let (scores, wanted) = (scores.storage_and_layout(), wanted.storage_and_layout());
        let (scores, _scores) = address::<f32>(&scores.0, scores.1, stream)?;
        let (wanted, _wanted) = address::<f32>(&wanted.0, wanted.1, stream)?;
        let (out, _out) = thresholds.device_ptr_mut(stream);
        let params = RowThresholdParams {
            scores: scores as *const f32,
            wanted: wanted as *const f32,
            thresholds: out as *mut f32,
            row_len: row_len as i64,
            counts: i32::from(weight == RowWeight::Count),
        };
        let function = Function::new(Kernel::RowThresholds, Dtype::Bf16, ANY_HEAD_DIM);
        let threads = (row_len <= SHORT.0).then_some(SHORT.1);
        // SAFETY: a block for each row of contiguous tensors of as many rows, all held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, [rows, 1, 1], threads) }?;
    }
    Ok(tensor(thresholds, &launcher.device, wanted.shape().clone()))
}
