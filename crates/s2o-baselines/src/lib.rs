//! Published sparse prefill methods, to compare S2O with.
//!
//! A method is one file and one [`BlockSelector`]: from the queries and keys of a call it picks key blocks for every
//! query block. [`BlockSparse`] makes an [`candle_s2o::Attention`] of it; one executor
//! ([`candle_s2o::block_sparse_attn`]) computes them all, and one rule counts their density.
//!
//! Selectors are written in Candle's tensor operations, so they run where the tensors are, all heads at once; on CUDA
//! what reads whole tensors (means of blocks, the attention of the last queries, antidiagonals, reordered keys) and the
//! choices from rows of scores are kernels. The choice itself stays there too ([`Keys`]).

mod antidiagonal;
mod attention;
mod attention_rows;
mod bounds;
mod config_file;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
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
mod softmax;
mod sparge;
mod sparge_config;
mod sparge_tuner;
mod stride_order;
mod top_cdf;
mod top_k;
mod tuning_call;
mod xattention;

pub use antidiagonal::antidiagonal_scores;
pub use attention::BlockSparse;
pub use error::BaselineError;
pub use flexprefill::{FlexPattern, FlexPrefill};
pub use head_pattern::{HeadPattern, MInferenceConfig};
pub use mask::{BlockMask, Keys, causal_blocks};
pub use mean_pooling::MeanPooling;
pub use minference::MInference;
pub use pbs::{Pbs, PbsScore};
pub use pooling::{block_means, block_scores};
pub use row_choice::{RowChoice, Select};
pub use selector::{BlockSelector, Reordered, Selection};
pub use sliding_window::SlidingWindow;
pub use sparge::Sparge;
pub use sparge_config::{SpargeConfig, SpargeHead, SpargeLayer};
pub use sparge_tuner::SpargeBounds;
pub use top_cdf::top_cdf;
pub use tuning_call::TuningCall;
pub use xattention::XAttention;

/// Elements of the largest tensor on the way to a choice, 128 MiB of f32: what is larger is computed in parts.
const MAX_INTERMEDIATE: usize = 1 << 25;
