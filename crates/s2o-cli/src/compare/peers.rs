//! Exact attention of other implementations, to compare ours with (`--against`).

use anyhow::{Result, bail};
use candle_core::Device;
use candle_s2o::Dense;
use clap::ValueEnum;
use s2o_eval::method::{Method, Sdpa};

/// Exact attention of another implementation, the reference for outputs and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// candle-flash-attn's kernels: bf16 or f16 on a GPU, in a build with the feature flash-attn
    FlashAttn,
    /// softmax(Q K^T) V with Candle's matmul and softmax in f32, on any device
    SdpaDense,
}

/// The reference of the comparison: our dense attention if no peer is named.
pub fn reference(peer: Option<Peer>, device: &Device) -> Result<Box<dyn Method>> {
    Ok(match peer {
        None => Box::new(Dense),
        Some(Peer::SdpaDense) => Box::new(Sdpa),
        Some(Peer::FlashAttn) if cfg!(feature = "flash-attn") && !device.is_cuda() => {
            bail!("--against flash-attn: expected --device cuda, got the CPU; --against sdpa-dense runs there")
        }
        #[cfg(feature = "flash-attn")]
        Some(Peer::FlashAttn) => Box::new(FlashAttn),
        #[cfg(not(feature = "flash-attn"))]
        Some(Peer::FlashAttn) => bail!(
            "--against flash-attn: expected a build with candle-flash-attn, got one without; build with --features \
             cuda,flash-attn, or take --against sdpa-dense"
        ),
    })
}

#[cfg(feature = "flash-attn")]
#[derive(Debug)]
struct FlashAttn;

#[cfg(feature = "flash-attn")]
impl candle_s2o::Attention for FlashAttn {
    fn name(&self) -> &str {
        "flash-attn"
    }

    fn prefill(
        &self,
        call: &candle_s2o::PrefillCall,
        q: &candle_core::Tensor,
        k: &candle_core::Tensor,
        v: &candle_core::Tensor,
    ) -> candle_core::Result<candle_core::Tensor> {
        candle_flash_attn::flash_attn(q, k, v, call.softmax_scale, true)
    }
}

#[cfg(feature = "flash-attn")]
impl Method for FlashAttn {}
