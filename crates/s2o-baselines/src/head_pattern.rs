//! What MInference does in a head, and the file that says it for a model.

use std::collections::BTreeMap;
use std::path::Path;

use candle_s2o::BLOCK_Q;
use serde::{Deserialize, Serialize};

use crate::config_file;
use crate::error::BaselineError;

const CONTENT: &str = "patterns of MInference by layer and head";

/// A pattern of [`MInference`](crate::MInference) with its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "pattern", rename_all = "kebab-case", deny_unknown_fields)]
pub enum HeadPattern {
    /// The first keys of the prompt and the last of every query, in whole blocks.
    AShape {
        /// First keys.
        sink: usize,
        /// Last keys, that of the query included.
        window: usize,
    },
    /// Keys and distances to which the last 64 queries attend most.
    VerticalSlash {
        /// Keys, 30 at least: the first 30 are always among them.
        verticals: usize,
        /// Distances, 100 at least: the least 100 are always among them.
        slashes: usize,
    },
    /// The key blocks of every query block with the greatest products of mean query and mean key.
    BlockSparse {
        /// Blocks of 128 keys.
        blocks: usize,
    },
}

impl HeadPattern {
    /// The published search space, in which all cost about as much in the publication's kernels. Its 100 blocks of 64
    /// keys are 50 of 128 here.
    pub const PUBLISHED: [Self; 6] = [
        Self::AShape { sink: 1024, window: 4096 },
        Self::VerticalSlash { verticals: 30, slashes: 2048 },
        Self::VerticalSlash { verticals: 100, slashes: 1800 },
        Self::VerticalSlash { verticals: 500, slashes: 1500 },
        Self::VerticalSlash { verticals: 3000, slashes: 200 },
        Self::BlockSparse { blocks: 50 },
    ];

    /// The pattern with all its sizes times `factor`, 1 at least each.
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

    /// Up to this many keys every query attends to all before it, so that the pattern tells nothing about a head.
    pub fn dense_up_to(self) -> usize {
        match self {
            Self::AShape { sink, window } => sink.saturating_add(window),
            Self::VerticalSlash { verticals, slashes } => verticals.max(slashes),
            Self::BlockSparse { blocks } => blocks.saturating_mul(BLOCK_Q),
        }
    }

    pub(crate) fn check(self) -> Result<Self, BaselineError> {
        match self {
            Self::AShape { window: 0, .. } => Err(BaselineError::option("minference", "window", "at least 1 token", 0)),
            Self::BlockSparse { blocks: 0 } => Err(BaselineError::option("minference", "blocks", "at least 1", 0)),
            pattern => Ok(pattern),
        }
    }
}

/// The patterns of a model's heads, as found by a search; (de)serializable. The file is JSON:
///
/// ```json
/// { "layers": { "0": [{ "pattern": "vertical-slash", "verticals": 500, "slashes": 1500 }] } }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MInferenceConfig {
    /// By layer, of every query head.
    pub layers: BTreeMap<usize, Vec<HeadPattern>>,
}

impl MInferenceConfig {
    /// Reads a file. Whether its sizes are in range is for [`MInference::from_config`](crate::MInference::from_config)
    /// to say.
    ///
    /// # Errors
    /// If it cannot be read or holds something else; unknown fields are refused.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, BaselineError> {
        config_file::load(path.as_ref(), CONTENT)
    }

    /// Writes a file that [`MInferenceConfig::load`] reads.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), BaselineError> {
        config_file::save(self, path.as_ref(), CONTENT)
    }
}
