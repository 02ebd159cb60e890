//! [`HeadPattern`]: the pattern of a head in MInference, and the file that holds those of a model.

use candle_s2o::BLOCK_Q;
use serde::{Deserialize, Serialize};

use crate::config_file::{LayerConfig, LayerEntry};
use crate::error::BaselineError;

/// A pattern of [`MInference`](crate::MInference) with its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "pattern", rename_all = "kebab-case", deny_unknown_fields)]
pub enum HeadPattern {
    /// The first keys of the prompt and the last keys of every query, in whole blocks.
    AShape {
        /// Number of first keys.
        sink: usize,
        /// Number of last keys, the query's own included.
        window: usize,
    },
    /// Keys and distances to which the last 64 queries attend most.
    VerticalSlash {
        /// Number of keys, at least 30: the first 30 are always among them.
        verticals: usize,
        /// Number of distances, at least 100: the smallest 100 are always among them.
        slashes: usize,
    },
    /// For every query block, the key blocks with the greatest products of mean query and mean key.
    BlockSparse {
        /// Number of blocks of 128 keys.
        blocks: usize,
    },
}

impl HeadPattern {
    /// The published search space, with about equal cost of all in the publication's kernels. Its 100 blocks of 64
    /// keys are 50 of 128 here.
    pub const PUBLISHED: [Self; 6] = [
        Self::AShape { sink: 1024, window: 4096 },
        Self::VerticalSlash { verticals: 30, slashes: 2048 },
        Self::VerticalSlash { verticals: 100, slashes: 1800 },
        Self::VerticalSlash { verticals: 500, slashes: 1500 },
        Self::VerticalSlash { verticals: 3000, slashes: 200 },
        Self::BlockSparse { blocks: 50 },
    ];

    /// The pattern with all sizes multiplied by `factor`, each at least 1.
    pub fn scaled(self, factor: f64) -> Self {
        let scaled = |size: usize| ((size as f64 * factor).round() as usize).max(1);
        match self {
            Self::AShape { sink, window } => Self::AShape { sink: scaled(sink), window: scaled(window) },
            Self::VerticalSlash { verticals, slashes } => {
                Self::VerticalSlash { verticals: scaled(verticals), slashes: scaled(slashes) }
            }
            Self::BlockSparse { blocks } => Self::BlockSparse { blocks: scaled(blocks) },
        }
    }

    /// The number of keys up to which the pattern is dense attention and says nothing about a head.
    pub fn dense_up_to(self) -> usize {
        match self {
            Self::AShape { sink, window } => sink.saturating_add(window),
            Self::VerticalSlash { verticals, slashes } => verticals.max(slashes),
            Self::BlockSparse { blocks } => blocks.saturating_mul(BLOCK_Q),
        }
    }

    pub(crate) fn check(self) -> Result<Self, BaselineError> {
        let (size, option) = match self {
            Self::AShape { window, .. } => (window, ["window", "at least 1 token"]),
            Self::BlockSparse { blocks } => (blocks, ["blocks", "at least 1"]),
            Self::VerticalSlash { .. } => return Ok(self),
        };
        BaselineError::unless(size > 0, "minference", option, size)?;
        Ok(self)
    }
}

/// The patterns of all query heads, by layer. [`MInference::from_config`](crate::MInference::from_config) checks their
/// sizes. The file is JSON:
///
/// ```json
/// { "layers": { "0": [{ "pattern": "vertical-slash", "verticals": 500, "slashes": 1500 }] } }
/// ```
pub type MInferenceConfig = LayerConfig<Vec<HeadPattern>>;

impl LayerEntry for Vec<HeadPattern> {
    const CONTENT: &'static str = "patterns of MInference by layer and head";
}
