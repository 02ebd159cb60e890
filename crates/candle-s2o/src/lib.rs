//! S2O sparse attention (early stopping via online permutation, arXiv 2602.22575) for Candle 0.11.
//!
//! A causal call of `candle-flash-attn`, on the CPU or a GPU:
//!
//! ```diff
//! +use candle_s2o::{Mask, S2oConfig, dense_attn, s2o_attn};
//!
//! -let out = candle_flash_attn::flash_attn(&q, &k, &v, softmax_scale, true)?;
//! +let out = s2o_attn(&q, &k, &v, softmax_scale, &S2oConfig::default())?;
//! +let exact = dense_attn(&q, &k, &v, softmax_scale, Mask::Causal)?; // to compare with
//! ```
//!
//! Attention by matrix products, whose q, k and v are (batch, heads, length, head_dim). Those of [`s2o_attn`] are
//! (batch, length, heads, head_dim), as in `candle-flash-attn`, and KV heads are not repeated:
//!
//! ```diff
//! -let (k, v) = (repeat_kv(k, heads / kv_heads)?, repeat_kv(v, heads / kv_heads)?);
//! -let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(&causal_mask)?;
//! -let out = softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?;
//! +let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
//! +let out = s2o_attn(&q, &k, &v, scale as f32, &S2oConfig::default())?;
//! ```
//!
//! A chunk of a prompt, with the keys and values up to its end, needs the length of the whole prompt:
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_s2o::{S2oConfig, S2oOp};
//! # let (softmax_scale, prompt_len) = (0.125, 512);
//! # let q = Tensor::randn(0f32, 1.0, (1, 128, 4, 64), &Device::Cpu)?;
//! # let k = Tensor::randn(0f32, 1.0, (1, 256, 2, 64), &Device::Cpu)?;
//! # let v = k.clone();
//! let op = S2oOp::new(softmax_scale, S2oConfig::default()).with_prompt_len(prompt_len);
//! let out = q.apply_op3(&k, &v, op)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`s2o_attn_with_stats`] also returns density and measured errors. Models use either method through the [`Attention`]
//! trait: [`S2o`] or [`Dense`]. [`LayerSettings`] hold the tuned setting of each layer of a model. The crate
//! `s2o-models` has a decoder.
//!
//! Tensors may be on the CPU or, with the feature `cuda` (see the module `cuda`), on an NVIDIA GPU.

mod attention;
mod attn_op;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod layer_settings;
mod methods;
mod ops;
mod pending_stats;

pub use attention::{Attention, ChunkLedger, PrefillCall};
pub use error::AttnError;
pub use layer_settings::{LayerSetting, LayerSettings, LayerSettingsError, TunedOn};
pub use methods::{Dense, S2o, break_even, break_even_of};
pub use ops::{
    KeyColumns, S2oOp, block_mask_attn, block_sparse_attn, dense_attn, dense_attn_with_softcap, s2o_attn,
    s2o_attn_with_stats,
};
pub use pending_stats::PendingStats;
pub use s2o_core::{
    AttnShape, AttnStats, BLOCK_Q, BlockError, BlockLists, BlockSelection, ConfigError, ConfigOption, DenseBelow,
    DenseTail, GainFrame, HeadStats, HeadWork, KeyScore, Mask, Permutation, Preset, ProbeStats, ProbeStride, Ranking,
    S2oConfig, S2oConfigBuilder, S2oError, SegmentLen, SegmentOrder, ShapeError, StopRule, Tau, TileStats,
    TriggeringTile, ValueError, query_blocks,
};
