//! NVIDIA GPUs (feature `cuda`): [`s2o_attn`](crate::s2o_attn), [`dense_attn`](crate::dense_attn) and the
//! [`Attention`](crate::Attention) methods take tensors on a CUDA device as they are. Here is what only a GPU has.
//!
//! **What runs.** bf16 and f16, head_dim 64 or 128, tiles of 128; anything else is a [`CudaError`] that says so. GPUs of
//! compute capability 9.0 (H100, H200) load machine code made for them, others from 8.0 on PTX that their driver
//! compiles at the first call; the environment variable `S2O_CUDA_ARCH` (`sm80` or `sm90a`) overrides the choice.
//!
//! **Layouts.** Any strides, as long as heads are contiguous and begin at multiples of 16 bytes: transposed, narrowed and
//! offset tensors are read in place. Others are copied first (expanded dimensions, a head_dim that is not innermost).
//!
//! **Streams.** Everything is enqueued on the Candle device's own stream, and the host waits for nothing but statistics,
//! orders and the first call of each kernel (which loads it). Scratch memory is allocated in the order of the stream,
//! from a pool that keeps it for the next call, so threads and streams do not disturb each other. Key orders take at
//! most [`S2oConfig::workspace_cap`](crate::S2oConfig::workspace_cap), 6 1/8 bytes per key and head; on top come the
//! partial results of split calls, the row states and orders of permuted queries, the coefficients of the key scores, and
//! counts of visited tiles where statistics are asked for.
//!
//! **CUDA graphs.** A call can be captured after one like it has run, which loads the kernels; the scratch memory
//! becomes the graph's. What makes the host wait, or copies lists to the GPU, is an error during a capture.

mod block;
mod call;
mod dense;
mod error;
pub(crate) mod fused;
#[cfg(feature = "ladder")]
mod gather;
mod library;
mod memory;
mod operand;
mod pool;
mod query_shares;
mod ranking;
mod reorder;
mod rows;
mod sparse;
mod stopwatch;
mod strides;
mod tensor_map;

pub use error::CudaError;
pub use pool::{PooledBlocks, block_pool, pools};
pub use query_shares::{MOST_LAST_QUERIES, attention_by_key, attention_by_key_and_distance};
pub use reorder::reorder_keys;
pub use rows::{RowChoice, Wanted, row_softmax};
pub use stopwatch::KernelTime;
pub use strides::{stride_shares, token_strides};

pub(crate) use block::{attend as block_sparse, attend_mask as block_mask};
pub(crate) use call::{Call, run};
pub(crate) use memory::{device_memory, keep_released};
pub(crate) use sparse::{Request, attend as s2o, rank};

use std::sync::Arc;

use candle_core::Tensor;
#[cfg(feature = "ladder")]
use s2o_core::Permutation;
use s2o_core::cpu::{Element, Inputs};

use crate::error::AttnError;
use crate::op::{DenseOp, Kernel, apply};

/// Prompt length in tokens from which S2O pays on a GPU, measured on an H200 (docs/kernels.md).
pub const BREAK_EVEN: usize = 8192;

/// Dense attention on a GPU.
pub(crate) fn dense(call: &Call, causal: bool) -> Result<(), AttnError> {
    Ok(dense::attend(call, causal, 0, None)?)
}

/// [`dense_attn`](crate::dense_attn) with its keys cut into `splits` parts that are computed apart and then joined, as
/// the dense tail is; calls with few queries split by themselves.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn_split(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
    splits: usize,
) -> Result<Tensor, AttnError> {
    Ok(apply(SplitOp { softmax_scale, causal, splits }, q, k, v)?.0)
}

/// [`dense_attn`](crate::dense_attn), and the time of its kernels. The host waits for them.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn_timed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<(Tensor, Vec<KernelTime>), AttnError> {
    apply(TimedOp(DenseOp { softmax_scale, causal }), q, k, v)
}

/// Attention of every query to ALL keys, each head's in the order `kv_perm[b * num_heads + h]`, and the time of the
/// kernel: the ladder of the paper's Tables 4-6 without causality. Shapes and dtypes as in
/// [`dense_attn`](crate::dense_attn), k_len a multiple of 128. Tiles of 128 queries stop early by `tau` as S2O's do; 0
/// never asks.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`CudaError::Keys`] if k_len or the orders do not.
#[cfg(feature = "ladder")]
pub fn gather_attn_timed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    kv_perm: impl Into<Arc<[Permutation]>>,
    tau: f32,
) -> Result<(Tensor, Vec<KernelTime>), AttnError> {
    let kv_perm = kv_perm.into();
    apply(TimedOp(GatherOp { softmax_scale, kv_perm, tau }), q, k, v)
}

#[derive(Debug)]
struct SplitOp {
    softmax_scale: f32,
    causal: bool,
    splits: usize,
}

impl Kernel for SplitOp {
    const NAME: &'static str = "split-attention";
    type Report = ();

    fn softmax_scale(&self) -> f32 {
        self.softmax_scale
    }

    fn cpu<T: Element>(&self, _: &Inputs<'_, T>, _: &mut [T]) -> Result<(), AttnError> {
        Err(AttnError::GpuOnly { what: Self::NAME })
    }

    fn cuda(&self, call: &Call) -> Result<(), AttnError> {
        Ok(dense::attend(call, self.causal, 0, Some(self.splits))?)
    }
}

#[cfg(feature = "ladder")]
#[derive(Debug)]
struct GatherOp {
    softmax_scale: f32,
    kv_perm: Arc<[Permutation]>,
    tau: f32,
}

#[cfg(feature = "ladder")]
impl Kernel for GatherOp {
    const NAME: &'static str = "gathered-attention";
    type Report = ();

    fn softmax_scale(&self) -> f32 {
        self.softmax_scale
    }

    fn cpu<T: Element>(&self, _: &Inputs<'_, T>, _: &mut [T]) -> Result<(), AttnError> {
        Err(AttnError::GpuOnly { what: Self::NAME })
    }

    fn cuda(&self, call: &Call) -> Result<(), AttnError> {
        Ok(gather::attend(call, &self.kv_perm, self.tau)?)
    }
}

/// An op whose kernels are timed.
#[derive(Debug)]
pub(crate) struct TimedOp<K>(pub(crate) K);

impl<K: Kernel> Kernel for TimedOp<K> {
    const NAME: &'static str = K::NAME;
    type Report = Vec<KernelTime>;

    fn softmax_scale(&self) -> f32 {
        self.0.softmax_scale()
    }

    fn cpu<T: Element>(&self, _: &Inputs<'_, T>, _: &mut [T]) -> Result<Self::Report, AttnError> {
        Err(AttnError::GpuOnly { what: "timing kernels" })
    }

    fn cuda(&self, call: &Call) -> Result<Self::Report, AttnError> {
        let stopwatch = Arc::default();
        self.0.cuda(&call.timed(&stopwatch))?;
        Ok(stopwatch.read()?)
    }
}
