//! S2O sparse attention (early stopping via online permutation, arXiv 2602.22575) for Candle.
//!
//! [`s2o_attn`] computes one call on tensors, in the layout of `candle-flash-attn`. [`dense_attn`] computes exact
//! attention for comparison. Models use either method through the [`Attention`] trait: [`S2o`] or [`Dense`].
//! [`LayerSettings`] hold the tuned setting of each layer of a model.
//!
//! [`S2oOp`] is the same attention as a Candle op, for `q.apply_op3(&k, &v, op)`. The crate `s2o-models` has a decoder.
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
pub use methods::{Dense, S2o, break_even};
pub use ops::{KeyColumns, S2oOp, block_mask_attn, block_sparse_attn, dense_attn, s2o_attn, s2o_attn_with_stats};
pub use pending_stats::PendingStats;
pub use s2o_core::{
    AttnShape, AttnStats, BLOCK_Q, BlockError, BlockLists, BlockSelection, ConfigError, ConfigOption, DenseBelow,
    GainFrame, HeadStats, HeadWork, KeyScore, Mask, Permutation, Preset, ProbeStats, ProbeStride, Ranking, S2oConfig,
    S2oConfigBuilder, S2oError, SegmentLen, SegmentOrder, ShapeError, StopRule, TileStats, TriggeringTile, ValueError,
    query_blocks,
};
