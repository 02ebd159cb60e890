//! [`S2oError`]: the reasons an attention call is refused.

use thiserror::Error;

use crate::blocks::BlockError;
use crate::config::{ConfigError, enough_mebibytes, mebibytes};
use crate::permutation::PermutationError;
use crate::shape::ShapeError;

/// The reason an attention call was refused. Every variant states the expected and the received value.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum S2oError {
    /// The options do not fit together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The sizes are not supported or do not fit together.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A key or query order given by the caller does not fit its segment.
    #[error("ranking: {0}")]
    Ranking(#[from] PermutationError),
    /// A selection of key blocks does not fit the call.
    #[error(transparent)]
    Blocks(#[from] BlockError),
    /// The key orders of a single segment do not fit the workspace cap: those of one query head on the CPU, of all
    /// heads and sequences on a GPU.
    #[error(
        "--workspace-mib (S2O_WORKSPACE_MIB): expected at least {} for one segment of {prefix_len} keys, got {}",
        enough_mebibytes(*.expected),
        mebibytes(*.got)
    )]
    WorkspaceTooSmall { expected: usize, got: usize, prefix_len: usize },
    /// The factor on `q . k` must be a finite number.
    #[error("softmax_scale: expected a finite number, got {got}")]
    SoftmaxScale { got: f32 },
    /// Scores are capped to a positive finite size.
    #[error("softcap: expected a positive finite number, got {got}; leave it out for none")]
    Softcap { got: f32 },
    /// A chunk cannot reach beyond its prompt.
    #[error("prompt_len: expected at least k_len = {k_len}, got {got}")]
    PromptShorterThanKeys { k_len: usize, got: usize },
}
