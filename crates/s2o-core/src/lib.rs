//! S2O, sparse attention with early stopping via online permutation (arXiv 2602.22575), in plain Rust: the algorithm, a
//! readable f64 reference, and a fast CPU path. It needs no Candle and no CUDA. One file has unsafe code.
//!
//! # From the paper to the code
//!
//! | paper | item |
//! |---|---|
//! | segment length S, tiles B_M and B_N, tau | [`S2oConfig`] ([`S2oConfig::paper`] for the paper's values) |
//! | segments, the local window and the prefix | [`segments`], [`Segment`], [`Plan`] |
//! | Algorithm 1, ranking: `k_scores`, `kv_perm`, `q_perm` | [`reference::rank`], [`cpu::rank`], [`SegmentOrder`] |
//! | Algorithm 2, pass 1: the window's state (m, l, acc) | [`reference::pass1`], [`cpu::attention`], [`SoftmaxState`] |
//! | Algorithm 3, pass 2: resume, gather in order, stop early | [`reference::pass2`], [`cpu::attention`] |
//! | Algorithm 4, both in one pass, without [`S2oConfig::q_perm`] | [`reference::single_pass`], [`cpu::attention`] |
//! | the stop condition on the gain of a tile | [`Gain`], [`StopVote`], [`StopRule`], [`GainFrame`] |
//! | exact probe queries (not of the paper) | [`S2oConfig::probe_stride`], [`probe_runs`], [`ProbeStats`] |
//! | a bound on the measured error (not of the paper) | [`S2oConfig::max_error`], [`ErrorControl`] |
//! | density and sparsity | [`AttnStats`], [`HeadStats`] |
//! | the block-sparse methods it is compared with | [`BlockSelection`], [`cpu::block_sparse`] |
//!
//! Each choice that the paper leaves open is an option of [`S2oConfig`]. docs/algorithm.md explains the defaults.
//!
//! # Example
//!
//! ```
//! use s2o_core::cpu::{self, Inputs, Strided};
//! use s2o_core::S2oConfig;
//!
//! let (len, heads, kv_heads, head_dim) = (2048, 2, 1, 16);
//! let wave = |n: usize| (0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<f32>>();
//! let (q, k, v) = (wave(len * heads * head_dim), wave(len * kv_heads * head_dim), wave(len * kv_heads * head_dim));
//! let inputs = Inputs::new(
//!     Strided::contiguous("q", &q, [1, len, heads, head_dim])?,
//!     Strided::contiguous("k", &k, [1, len, kv_heads, head_dim])?,
//!     Strided::contiguous("v", &v, [1, len, kv_heads, head_dim])?,
//!     0.25f32,
//! )?;
//! let mut out = vec![0.0; q.len()];
//! let stats = cpu::attention(&inputs, &S2oConfig::default(), len, &mut out)?;
//! println!("computed {:.0} % of the tiles", 100.0 * stats.density());
//! # Ok::<(), s2o_core::S2oError>(())
//! ```

#![deny(unsafe_code)]

mod blocks;
mod config;
pub mod cpu;
mod early_stop;
mod error;
mod error_control;
mod online_softmax;
mod permutation;
mod plan;
mod probes;
pub mod reference;
mod score_scale;
mod segment;
mod shape;
mod stats;

pub use blocks::{BLOCK_Q, BlockError, BlockLists, BlockSelection, HeadWork, query_blocks};
pub use config::{
    ConfigError, ConfigOption, DenseBelow, DenseTail, GainFrame, KeyScore, Preset, ProbeStride, S2oConfig,
    S2oConfigBuilder, SegmentLen, StopRule, Tau, TriggeringTile, ValueError,
};
pub use early_stop::{Gain, StopVote};
pub use error::S2oError;
pub use error_control::ErrorControl;
pub use online_softmax::{RowUpdate, SoftmaxState};
pub use permutation::{Permutation, PermutationError, order_desc};
pub use plan::{Plan, Ranking, SegmentOrder};
pub use probes::{ProbeStats, probe_runs};
pub use score_scale::ScoreScale;
pub use segment::{Segment, causal_tiles, position_tiles, query_tiles, segments};
pub use shape::{AttnShape, Mask, ShapeError};
pub use stats::{AttnStats, HeadStats, TileStats};
