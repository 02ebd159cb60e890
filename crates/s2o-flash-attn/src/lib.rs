//! The functions of `candle-flash-attn` 0.11 with the same names, arguments and conventions, on top of [`candle_s2o`].
//!
//! A process-wide policy ([`s2o`]) makes long causal attention sparse. All other attention is exact. Users get this
//! crate as `candle-flash-attn`, through a `[patch.crates-io]` line (docs/swap.md).
//!
//! | | CPU (f32, f16, bf16) | CUDA (f16, bf16) |
//! |---|---|---|
//! | causal, no window | S2O or dense, by the policy | the same, `head_dim` up to 256 |
//! | not causal | dense | dense, `head_dim` up to 512 |
//! | window, ALiBi, softcap, prefix ranges | dense, a plain loop | dense |
//! | `varlen`, `paged` | a call per sequence | long sequences by the policy, one launch for the others |
//!
//! The effect of the arguments decides, not the function: a window that hides no key is not a window, and
//! `window_size_right = Some(0)` alone is causal. The causal mask is bottom-right: queries are the last positions of
//! the keys. A query that sees no key gets zeros. Gradients are not supported.
//!
//! Every function returns an error if the tensors do not fit, or the GPU kernels do not support the call, see
//! [`FlashAttnError`].
#![expect(clippy::too_many_arguments, reason = "the signatures of candle-flash-attn")]

mod engine;
mod error;
mod fixed;
#[cfg(feature = "cuda")]
mod kernel;
mod layer_count;
mod mask;
#[cfg(feature = "cuda")]
mod pages;
mod plain;
#[cfg(feature = "cuda")]
mod resize;
pub mod s2o;
mod varlen;
#[cfg(feature = "cuda")]
mod varlen_gpu;

pub use engine::FlashAttn;
pub use error::FlashAttnError;
pub use fixed::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap, flash_attn_windowed,
};
pub use varlen::{
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
};
