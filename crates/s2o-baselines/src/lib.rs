//! Published sparse prefill methods for comparison with S2O.
//!
//! Each method is one file and one [`BlockSelector`], which picks key blocks for every query block from the queries and
//! keys of a call. [`BlockSparse`] turns it into a [`candle_s2o::Attention`]. One executor
//! ([`candle_s2o::block_sparse_attn`]) computes all methods, and one rule counts their density.
//!
//! Selectors use Candle's tensor operations on all heads at once, on the device of the tensors. On CUDA, kernels do the
//! steps that read whole tensors (block means, attention of the last queries, antidiagonals, reordered keys) and the
//! choices from rows of scores. The choice stays on the device too ([`Keys`]).

mod antidiagonal;
mod attention;
mod attention_rows;
mod bounds;
mod config_file;
#[cfg(feature = "cuda")]
pub mod cuda;
mod delta;
mod error;
mod flashprefill;
mod flexprefill;
mod head_pattern;
mod key_order;
mod mask;
mod mean_pooling;
mod minference;
mod pbs;
mod pooling;
mod row_choice;
mod selector;
mod slash;
mod sliding_window;
mod sparge;
mod sparge_config;
mod sparge_tuner;
mod xattention;

pub use antidiagonal::antidiagonal_scores;
pub use attention::BlockSparse;
pub use config_file::{LayerConfig, LayerEntry};
pub use error::BaselineError;
pub use flashprefill::FlashPrefill;
pub use flexprefill::{FlexPattern, FlexPrefill};
pub use head_pattern::{HeadPattern, MInferenceConfig};
pub use mask::{BlockMask, Keys, causal_blocks};
pub use mean_pooling::MeanPooling;
pub use minference::MInference;
pub use pbs::{Pbs, PbsScore};
pub use pooling::{block_means, block_scores};
pub use row_choice::{RowChoice, Select, top_cdf};
pub use selector::{BlockSelector, Reordered, Selection, TuningCall};
pub use sliding_window::SlidingWindow;
pub use sparge::Sparge;
pub use sparge_config::{SpargeConfig, SpargeHead, SpargeLayer};
pub use sparge_tuner::SpargeBounds;
pub use xattention::XAttention;

/// Most elements of an intermediate tensor, 128 MiB of f32. Larger ones are computed in parts.
const MAX_INTERMEDIATE: usize = 1 << 25;
