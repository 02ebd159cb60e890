//! Launch layer of the CUDA kernels of candle-s2o, on Candle tensors. It loads the compiled kernels of a GPU, allocates
//! scratch memory in stream order, and enqueues kernels on the stream of a Candle device. It contains no attention.
//!
//! A caller makes a `Launcher` for a device or tensor, takes the addresses of its tensors (`Operand`, `address`)
//! and scratch memory (`Launcher::allocate`), fills in the kernel's parameters and calls `Launcher::launch`, the
//! only place that launches a kernel.
//!
//! Every function that returns a `CudaError` fails if the driver does, for example when memory runs out. Their
//! documentation names the other errors.
//!
//! The crate is empty without the feature `cuda`.
#![cfg(feature = "cuda")]

mod aside;
mod error;
mod host_memory;
mod launcher;
mod library;
mod memory;
mod operand;
mod stopwatch;

pub use aside::Aside;
pub use error::{CudaError, check_i32, head_dim, to_i32};
pub use host_memory::{Copies, HostMemory, Mark};
pub use launcher::{ANY_HEAD_DIM, Grid, Launcher};
pub use memory::{Region, Regions, Scratch, free_and_total, keep_released};
pub use operand::{Element, Operand, View, address, cuda_storage, is_vectorized, unaligned_address};
pub use stopwatch::{KernelTime, Stopwatch};
