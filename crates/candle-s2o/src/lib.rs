//! S2O sparse attention (early stopping via online permutation, arXiv 2602.22575) for Candle.
//!
//! [`s2o_attn`] is one call on tensors, in the layout of `candle-flash-attn`; [`dense_attn`] is the exact attention to
//! compare it with. Models take either through the [`Attention`] seam: [`S2o`] or [`Dense`]. [`LayerSettings`] are what
//! tuning on a model found for its layers.
//!
//! For whole models there are [`fused`], the steps of a decoder layer beside its products and attention, [`decode_attn`]
//! for one new token, and [`DeviceMemory`].
//!
//! Tensors may be on the CPU or, with the feature `cuda`, on an NVIDIA GPU; what then holds is said in the module `cuda`.

mod attention;
mod block_sparse;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod decode;
mod device_memory;
mod error;
pub mod fused;
mod layer_settings;
mod methods;
mod op;

pub use attention::{Attention, PrefillCall};
pub use block_sparse::{KeyColumns, block_mask_attn, block_sparse_attn};
pub use decode::decode_attn;
pub use device_memory::{DeviceMemory, is_out_of_memory};
pub use error::AttnError;
pub use layer_settings::{LayerSetting, LayerSettings, LayerSettingsError, TunedOn};
pub use methods::{Dense, S2o};
pub use op::{S2oOp, dense_attn, s2o_attn, s2o_attn_with_stats};
pub use s2o_core::{
    AttnShape, AttnStats, BLOCK_Q, BlockError, BlockLists, BlockSelection, ConfigError, ConfigOption, DenseBelow,
    GainFrame, HeadStats, HeadWork, KeyScore, Permutation, Preset, Ranking, S2oConfig, S2oConfigBuilder, S2oError,
    SegmentLen, SegmentOrder, ShapeError, SkippedMass, StopRule, TileStats, TriggeringTile, ValueError, query_blocks,
};
