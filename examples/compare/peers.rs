//! Exact attention by others, to compare ours with (`--against`).

use candle_core::{DType, Device, Result, Tensor};
use candle_s2o::{Attention, Dense, PrefillCall};
use clap::ValueEnum;
use thiserror::Error;

use crate::methods::{Density, Method};

/// What outputs and times are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// candle-flash-attn's kernels: bf16 or f16 on a GPU, in a build with the feature flash-attn
    FlashAttn,
    /// softmax(Q K^T) V by Candle's matmul and softmax in f32, anywhere
    SdpaDense,
}

/// Why a peer cannot take part.
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

/// What the methods are compared with: our dense attention if no peer is named.
pub fn reference(peer: Option<Peer>, device: &Device) -> std::result::Result<Box<dyn Method>, PeerError> {
    match peer {
        None => Ok(Box::new(Dense)),
        Some(Peer::SdpaDense) => Ok(Box::new(SdpaDense)),
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

/// candle-flash-attn.
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
    fn take_density(&self, num_heads: usize) -> Density {
        Dense.take_density(num_heads)
    }
}

/// Scores that are held at a time.
const SCORES: usize = 1 << 26;

/// Attention as it is written down, by Candle's ops.
#[derive(Debug)]
struct SdpaDense;

impl Attention for SdpaDense {
    fn name(&self) -> &str {
        "sdpa-dense"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (batch, q_len, num_heads, head_dim) = q.dims4()?;
        let (_, k_len, num_kv_heads, _) = k.dims4()?;
        let group_size = num_heads / num_kv_heads;
        let heads_first = |t: &Tensor| t.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
        let (keys, values) = (heads_first(k)?, heads_first(v)?);
        let rows_at_a_time = (SCORES / (batch * num_heads * k_len)).max(1);
        let mut parts = Vec::new();
        for start in (0..q_len).step_by(rows_at_a_time) {
            let rows = rows_at_a_time.min(q_len - start);
            let first = k_len - q_len + start;
            let visible = first + rows;
            // The query heads of a group are rows of one matrix: no KV head is repeated.
            let queries = heads_first(&q.narrow(1, start, rows)?)?;
            let queries = queries.reshape((batch, num_kv_heads, group_size * rows, head_dim))?;
            let scores = queries.matmul(&keys.narrow(2, 0, visible)?.t()?.contiguous()?)?;
            let scores = (scores * f64::from(call.softmax_scale))?;
            let scores = scores.reshape((batch, num_heads, rows, visible))?;
            let scores = scores.broadcast_add(&causal_mask(first, rows, visible, q.device())?)?;
            let weights = candle_nn::ops::softmax_last_dim(&scores)?;
            let weights = weights.reshape((batch, num_kv_heads, group_size * rows, visible))?;
            let out = weights.matmul(&values.narrow(2, 0, visible)?.contiguous()?)?;
            parts.push(out.reshape((batch, num_heads, rows, head_dim))?.transpose(1, 2)?.to_dtype(q.dtype())?);
        }
        Tensor::cat(&parts, 1)?.contiguous()
    }
}

/// `(rows, visible)`: 0 for keys up to a query's own position, the first of which is `first`, and minus infinity beyond.
fn causal_mask(first: usize, rows: usize, visible: usize, device: &Device) -> Result<Tensor> {
    let positions = Tensor::arange(first as u32, (first + rows) as u32, device)?.unsqueeze(1)?;
    let keys = Tensor::arange(0u32, visible as u32, device)?.unsqueeze(0)?;
    let hidden = keys.broadcast_gt(&positions)?;
    let shape = hidden.shape();
    let (beyond, upto) = (Tensor::new(f32::NEG_INFINITY, device)?, Tensor::new(0f32, device)?);
    hidden.where_cond(&beyond.broadcast_as(shape)?, &upto.broadcast_as(shape)?)
}

impl Method for SdpaDense {
    fn take_density(&self, num_heads: usize) -> Density {
        Dense.take_density(num_heads)
    }
}
