//! Ops whose kernels are timed individually.

use std::sync::Arc;

use candle_core::{CpuStorage, Tensor};
use s2o_core::Mask;
use s2o_cuda::KernelTime;

use super::call::{Call, CudaOp};
use crate::attn_op::{AttnOp, Compute, Qkv, apply};
use crate::error::AttnError;
use crate::ops::{DenseOp, S2oOp};

impl S2oOp {
    /// [`S2oOp::apply`] on a GPU with the time of each kernel in launch order. The host waits for the kernels.
    ///
    /// # Errors
    /// The same as [`S2oOp::apply`], or [`AttnError::GpuOnly`] for tensors on the CPU.
    pub fn apply_timed(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Vec<KernelTime>), AttnError> {
        let scale = self.scale;
        apply(&Timed(self), scale, [q, k, v])
    }
}

/// [`dense_attn`](crate::dense_attn) on a GPU with the time of each kernel. The host waits for the kernels.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`AttnError::GpuOnly`] for tensors on the CPU.
pub fn dense_attn_timed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: Mask,
) -> Result<(Tensor, Vec<KernelTime>), AttnError> {
    apply(&Timed(DenseOp { mask, splits: None }), softmax_scale, [q, k, v])
}

/// An op that reports the times of its kernels.
#[derive(Debug)]
pub(super) struct Timed<K>(pub(super) K);

impl<K: AttnOp> AttnOp for Timed<K> {
    const NAME: &'static str = K::NAME;
    const HAS_OUTPUT: bool = K::HAS_OUTPUT;
    type Report = Vec<KernelTime>;
}

impl<K: AttnOp> Compute<CpuStorage> for Timed<K> {
    fn compute(&self, _: &Qkv<'_, CpuStorage>) -> Result<(Option<CpuStorage>, Self::Report), AttnError> {
        Err(AttnError::GpuOnly { what: "timing kernels" })
    }
}

impl<K: CudaOp> CudaOp for Timed<K> {
    fn run(&self, call: &Call) -> Result<Self::Report, AttnError> {
        let stopwatch = Arc::default();
        self.0.run(&call.timed(&stopwatch))?;
        Ok(stopwatch.read()?)
    }
}
