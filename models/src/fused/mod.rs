//! The steps of a decoder layer between its matrix products and attention, in as few passes over memory as possible.
//!
//! On a GPU, in bf16 and f16, each function is one kernel that reads and writes every byte once and sums in f32. In
//! other cases, and for sizes that the kernels do not support, it uses the equivalent Candle ops. A forward pass
//! neither waits for the device nor copies from the host. Gradients are not supported.

mod adding;
#[cfg(feature = "cuda")]
mod cuda;
mod gated;
mod heads;
mod int8;
mod int8_linear;
#[cfg(feature = "cuda")]
mod likeliest;
mod linear;
mod norm;
#[cfg(feature = "cuda")]
mod products;
mod rotary;
mod stacked;
#[cfg(feature = "cuda")]
mod written;

pub use adding::Adding;
pub use gated::GatedLinear;
pub use heads::join_heads;
pub use int8::{Int8Rows, decode_attn_int8};
pub use int8_linear::{Int8Linear, RotatedInt8, Rows, supports_int8};
pub(crate) use int8_linear::{MAX_WIDTH as INT8_MAX_WIDTH, NEEDS as INT8_NEEDS};
#[cfg(feature = "cuda")]
pub use likeliest::Likeliest;
pub use linear::{Linear, LinearPrecision};
pub use norm::{add_rms_norm, rms_norm, rms_norm_int8};
pub use rotary::{Heads, LayerCache, QkNorm, Rotary, Rotation, rotate_into_cache};
pub use stacked::{Stacked, StackedLinear, silu_mul};

use candle_core::{DType, Device};
#[cfg(feature = "cuda")]
use {
    candle_core::{Result, Tensor, bail},
    s2o_kernels::Kernel,
};

/// Whether this build has the kernels, and they support this dtype and device.
pub(crate) fn supports(device: &Device, dtype: DType) -> bool {
    cfg!(feature = "cuda") && device.is_cuda() && matches!(dtype, DType::BF16 | DType::F16)
}

/// Whether heads of this size can be rotated and attended to.
#[cfg(feature = "cuda")]
pub(crate) fn supports_head_dim(head_dim: usize) -> bool {
    Kernel::Rotate.head_dim(head_dim).is_some()
}

/// Refuses tensors of another dtype or on another device.
#[cfg(feature = "cuda")]
fn same_kind(what: &str, x: &Tensor, others: &[Option<&Tensor>]) -> Result<()> {
    for other in others.iter().flatten() {
        if other.dtype() != x.dtype() || !other.device().same_device(x.device()) {
            let kind = |tensor: &Tensor| format!("{:?} on {:?}", tensor.dtype(), tensor.device().location());
            bail!("{what}: expected tensors of {}, got {}", kind(x), kind(other))
        }
    }
    Ok(())
}
