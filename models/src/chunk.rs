//! [`Chunk`]: the number of prompt tokens that go through the layers together.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use thiserror::Error;

use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;

/// Number of prompt tokens that go through all layers together. It bounds the activations for any prompt length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Chunk {
    /// The whole prompt.
    #[default]
    Whole,
    /// As many as the free memory of the device allows, a multiple of 2048 from 2048 to 65536; 8192 on a CPU.
    Auto,
    /// This many tokens.
    Tokens(usize),
}

impl From<usize> for Chunk {
    fn from(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }
}

/// `None` is the whole prompt.
impl From<Option<usize>> for Chunk {
    fn from(tokens: Option<usize>) -> Self {
        tokens.map_or(Self::Whole, Self::Tokens)
    }
}

/// The error for a string that is not a [`Chunk`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected auto, whole or a number of tokens from 1 on, got {0:?}")]
pub struct UnknownChunk(String);

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Auto => f.write_str("auto"),
            Self::Tokens(tokens) => tokens.fmt(f),
        }
    }
}

impl FromStr for Chunk {
    type Err = UnknownChunk;

    fn from_str(text: &str) -> Result<Self, UnknownChunk> {
        match text {
            "auto" => Ok(Self::Auto),
            "whole" => Ok(Self::Whole),
            number => match number.parse() {
                Ok(tokens) if tokens > 0 => Ok(Self::Tokens(tokens)),
                _ => Err(UnknownChunk(text.to_owned())),
            },
        }
    }
}

/// Chunks are whole S2O segments: the queries of a segment that a chunk cuts are ranked in two parts.
const STEP: usize = 2048;
/// Largest chunk. Matrix products of more than 16384 rows are not faster per row, but attention is, and a KV cache in host
/// memory is read once for each chunk.
pub(crate) const MOST: usize = 65536;
const ON_CPU: usize = 8192;
/// Bytes for the workspace of attention and the allocations of libraries.
const RESERVE: u64 = 3 << 29;

impl Chunk {
    /// The chunk's tokens per sequence on a device that has `memory` (`None`: a CPU) after the allocation of cache and
    /// weights; `None` for the whole prompt.
    pub(crate) fn tokens(
        self,
        config: &DecoderConfig,
        dtype: DType,
        batch: usize,
        memory: Option<DeviceMemory>,
    ) -> Option<usize> {
        match (self, memory) {
            (Self::Whole, _) => None,
            (Self::Tokens(tokens), _) => Some(tokens),
            (Self::Auto, None) => Some(ON_CPU),
            (Self::Auto, Some(memory)) => {
                // Half of the free memory, because the pieces that pools allocate rarely fit exactly.
                let room = memory.free.saturating_sub(RESERVE) / 2;
                let tokens = room / (activation_bytes(config, dtype) * batch.max(1) as u64);
                let tokens = usize::try_from(tokens).unwrap_or(MOST) / STEP * STEP;
                Some(tokens.clamp(STEP, MOST))
            }
        }
    }
}

/// Most bytes per token of a chunk inside a layer: gate, up and their product in the MLP, or q, k, v, the rotated q and
/// the output in attention; in addition the residual stream before and after a sum, its norm and the addend. Kernels that
/// store no gate and up, or add in place, need less.
pub(crate) fn activation_bytes(config: &DecoderConfig, dtype: DType) -> u64 {
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let inner = (3 * config.intermediate_size).max(3 * q + 2 * kv);
    ((inner + 4 * config.hidden_size) * dtype.size_in_bytes()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::synthetic::Shape;

    const GB: u64 = 1_000_000_000;

    fn llama_8b() -> DecoderConfig {
        Shape::Llama31_8b.config().unwrap()
    }

    fn auto(free: u64, batch: usize) -> usize {
        let memory = DeviceMemory { free, total: 141 * GB };
        Chunk::Auto.tokens(&llama_8b(), DType::BF16, batch, Some(memory)).unwrap()
    }

    #[test]
    fn what_is_free_decides() {
        // An H200 with weights and the cache of 128K or 512K tokens; smaller GPUs; none left.
        assert_eq!([auto(105 * GB, 1), auto(50 * GB, 1)], [MOST; 2]);
        assert_eq!([auto(4 * GB, 1), auto(5 * GB, 2), auto(0, 1)], [8192, 6144, STEP]);
        assert_eq!(Chunk::Auto.tokens(&llama_8b(), DType::F32, 1, None), Some(ON_CPU));
    }

    #[test]
    fn a_chunk_of_the_largest_size_keeps_within_its_share() {
        let (weights, kv) = (16_060_000_000u64, 131_072u64);
        let chunk = MOST as u64 * activation_bytes(&llama_8b(), DType::BF16);
        assert!(weights + kv * 131_072 + chunk + RESERVE <= 44 * GB);
        assert!(weights + kv * 524_288 + chunk + RESERVE <= 105 * GB);
    }

    #[test]
    fn texts_parse() {
        for (text, chunk) in [("auto", Chunk::Auto), ("whole", Chunk::Whole), ("4096", Chunk::Tokens(4096))] {
            assert_eq!(text.parse(), Ok(chunk));
            assert_eq!(chunk.to_string(), text);
        }
        for wrong in ["all", "0", "-1"] {
            let error = wrong.parse::<Chunk>().unwrap_err().to_string();
            assert_eq!(error, format!("expected auto, whole or a number of tokens from 1 on, got {wrong:?}"));
        }
    }
}
