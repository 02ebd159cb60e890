//! Exact attention of other implementations, to compare ours with (`--against`).

use candle_core::Device;
use candle_s2o::Dense;
use clap::ValueEnum;
use s2o_eval::method::{Method, Sdpa};
use thiserror::Error;
#[cfg(feature = "flash-attn")]
use {
    candle_core::{Result, Tensor},
    candle_s2o::{Attention, HeadWork, PrefillCall},
    s2o_eval::method::{Timed, timed_exact},
    std::collections::BTreeMap,
};

/// Exact attention of another implementation, the reference for outputs and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// candle-flash-attn's kernels: bf16 or f16 on a GPU, in a build with the feature flash-attn
    FlashAttn,
    /// softmax(Q K^T) V with Candle's matmul and softmax in f32, on any device
    SdpaDense,
}

/// A reason why a peer cannot be used.
#[derive(Debug, Error)]
pub enum PeerError {
    #[cfg(not(feature = "flash-attn"))]
    #[error(
        "--against flash-attn: expected a build with candle-flash-attn, got one without; build with --features \
         cuda,flash-attn, or take --against sdpa-dense"
    )]
    NotBuilt,
    #[cfg(feature = "flash-attn")]
    #[error("--against flash-attn: expected --device cuda, got the CPU; --against sdpa-dense runs there")]
    GpuOnly,
}

/// The reference of the comparison: our dense attention if no peer is named.
pub fn reference(peer: Option<Peer>, device: &Device) -> std::result::Result<Box<dyn Method>, PeerError> {
    match peer {
        None => Ok(Box::new(Dense)),
        Some(Peer::SdpaDense) => Ok(Box::new(Sdpa)),
        Some(Peer::FlashAttn) => flash_attn(device),
    }
}

#[cfg(feature = "flash-attn")]
fn flash_attn(device: &Device) -> std::result::Result<Box<dyn Method>, PeerError> {
    if device.is_cuda() { Ok(Box::new(FlashAttn)) } else { Err(PeerError::GpuOnly) }
}

#[cfg(not(feature = "flash-attn"))]
fn flash_attn(_: &Device) -> std::result::Result<Box<dyn Method>, PeerError> {
    Err(PeerError::NotBuilt)
}

#[cfg(feature = "flash-attn")]
#[derive(Debug)]
struct FlashAttn;

#[cfg(feature = "flash-attn")]
impl Attention for FlashAttn {
    fn name(&self) -> &str {
        "flash-attn"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        candle_flash_attn::flash_attn(q, k, v, call.softmax_scale, true)
    }
}

#[cfg(feature = "flash-attn")]
impl Method for FlashAttn {
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        BTreeMap::new()
    }

    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        timed_exact(self, call, q, k, v)
    }
}
