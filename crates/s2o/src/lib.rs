//! S2O, sparse attention with early stopping via online permutation (arXiv 2602.22575), in plain Rust.
#![deny(unsafe_code)]

mod config;
pub mod cpu;
mod early_stop;
mod error;
mod online_softmax;
mod permutation;
mod plan;
pub mod reference;
mod segment;
mod shape;
mod stats;

pub use config::{ConfigError, GainFrame, KeyScore, S2oConfig, S2oConfigBuilder, SegmentLen, StopRule, TriggeringTile};
pub use early_stop::{Gain, StopVote};
pub use error::S2oError;
pub use online_softmax::{RowUpdate, SoftmaxState};
pub use permutation::{Permutation, PermutationError, order_desc};
pub use plan::{Chunk, Plan, Ranking, SegmentOrder};
pub use segment::{Segment, causal_tiles, query_tiles, segments};
pub use shape::{AttnShape, ShapeError};
pub use stats::{AttnStats, HeadStats, SkippedMass, TileStats};
