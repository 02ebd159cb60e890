//! NVIDIA GPUs (feature `cuda`): [`s2o_attn`](crate::s2o_attn), [`dense_attn`](crate::dense_attn) and the
//! [`Attention`](crate::Attention) methods accept tensors on a CUDA device. This module contains the GPU-only functions
//! and errors.
//!
//! **Support.** bf16 and f16, head_dim 64, 128 or 256, tiles of 128. A head_dim of 256 needs a GPU with 163 KiB of
//! shared memory for a block, as the A100 and the H100 have and consumer cards do not. Other calls return a
//! [`CudaError`]. GPUs of compute capability 9.0 (H100, H200) load machine code built for them. Other GPUs from 8.0 on
//! load PTX, which their driver compiles at the first call. The environment variable `S2O_CUDA_ARCH` (`sm80` or `sm90a`)
//! overrides the choice.
//!
//! **Layouts.** Tensors are read in place, with any strides, if their heads are contiguous and begin at multiples of 16
//! bytes (transposed, narrowed and offset tensors). Other tensors are copied first (expanded dimensions, a head_dim
//! that is not innermost).
//!
//! **Streams.** All work is enqueued on the stream of the Candle device. The host waits only when it reads statistics
//! or orders, and for the first call of each kernel (which loads it). Scratch memory is allocated in stream order from
//! a pool that keeps it for the next call, so threads and streams do not disturb each other. Key orders take at most
//! [`S2oConfig::workspace_cap`](crate::S2oConfig::workspace_cap), 6 1/8 bytes per key and head. In addition, a call
//! holds the partial results of split calls, the row states and orders of permuted queries, the coefficients of the key
//! scores, 12 bytes for each row and head with probes, and counts of visited tiles.
//!
//! **CUDA graphs.** A call can be captured after a similar call has run and loaded the kernels. The graph then owns the
//! scratch memory. During a capture, a call that makes the host wait or copies lists to the GPU is an error.

mod block;
mod call;
mod counters;
mod decode;
mod dense;
mod device_stats;
#[cfg(feature = "ladder")]
mod ladder;
mod probes;
mod ranking;
mod s2o;
mod segment_group;
mod share;
mod tail;
mod timed;

#[doc(hidden)]
pub use dense::dense_attn_split;
pub(crate) use device_stats::DeviceStats;
#[cfg(feature = "ladder")]
pub use ladder::gather_attn_timed;
pub use s2o_cuda::{CudaError, KernelTime};
pub use timed::dense_attn_timed;
