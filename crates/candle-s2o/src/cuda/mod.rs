//! NVIDIA GPUs (feature `cuda`): [`s2o_attn`](crate::s2o_attn), [`dense_attn`](crate::dense_attn) and the
//! [`Attention`](crate::Attention) methods take tensors on a CUDA device as they are. This module has what only a GPU
//! has.
//!
//! **What runs.** bf16 and f16, head_dim 64 or 128, tiles of 128; anything else is a [`CudaError`] that says so. GPUs
//! of compute capability 9.0 (H100, H200) load machine code made for them, others from 8.0 on PTX that their driver
//! compiles at the first call; the environment variable `S2O_CUDA_ARCH` (`sm80` or `sm90a`) overrides the choice.
//!
//! **Layouts.** Any strides, as long as heads are contiguous and begin at multiples of 16 bytes: transposed, narrowed
//! and offset tensors are read in place. Others are copied first (expanded dimensions, a head_dim that is not
//! innermost).
//!
//! **Streams.** Everything is enqueued on the Candle device's own stream, and the host waits for nothing but
//! statistics, orders and the first call of each kernel (which loads it). Scratch memory is allocated in the order of
//! the stream, from a pool that keeps it for the next call, so threads and streams do not disturb each other. Key
//! orders take at most [`S2oConfig::workspace_cap`](crate::S2oConfig::workspace_cap), 6 1/8 bytes per key and head; on
//! top come the partial results of split calls, the row states and orders of permuted queries, the coefficients of the
//! key scores, and counts of visited tiles where statistics are asked for.
//!
//! **CUDA graphs.** A call can be captured after one like it has run, which loads the kernels; the scratch memory
//! becomes the graph's. What makes the host wait, or copies lists to the GPU, is an error during a capture.

mod block;
mod call;
mod dense;
#[cfg(feature = "ladder")]
mod ladder;
mod ranking;
mod s2o;
mod segment_group;
mod timed;

#[doc(hidden)]
pub use dense::dense_attn_split;
#[cfg(feature = "ladder")]
pub use ladder::gather_attn_timed;
pub use s2o_cuda::{CudaError, KernelTime};
pub use timed::dense_attn_timed;
