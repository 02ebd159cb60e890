//! The steps of a decoder layer between its matrix products and attention, in as few passes over memory as possible.
//!
//! On a GPU, in bf16 and f16, each function is one kernel that reads and writes every byte once and sums in f32. In
//! other cases, and for sizes that the kernels do not support, it uses the equivalent Candle ops. Only [`Rotary::new`]
//! waits for the device or copies from the host. Gradients are not supported.

#[cfg(feature = "cuda")]
mod cuda;
mod heads;
mod norm;
mod rotary;
mod stacked;
pub(crate) mod support;

pub use heads::{Heads, QkNorm};
pub use norm::{add_rms_norm, rms_norm};
pub use rotary::{LayerCache, Rotary, Rotation, rotate_into_cache};
pub use stacked::{Stacked, StackedLinear, silu_mul};
