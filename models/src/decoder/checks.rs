//! What a decoder refuses before any work: prompts, caches, dtypes and precisions that do not fit it.

use candle_core::{DType, Tensor};

use super::Decoder;
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::fused::{INT8_MAX_WIDTH, INT8_NEEDS, LinearPrecision, supports_int8};
use crate::kv_cache::KvCache;
use crate::layers::Weights;

impl Decoder {
    /// Checks that tokens `(batch, len)` fit the model and the cache; returns batch and length.
    pub(crate) fn check_tokens(&self, tokens: &Tensor, cache: &KvCache) -> Result<(usize, usize)> {
        let &[batch, len] = tokens.dims() else {
            return Err(ModelError::input("prompt tensor", "(batch, len)", format!("{:?}", tokens.dims())));
        };
        self.check_shape(batch, len, cache)?;
        if tokens.dtype() != DType::U32 {
            return Err(ModelError::input("dtype of the tokens", "u32", format!("{:?}", tokens.dtype())));
        }
        self.check_ids(&tokens.flatten_all()?.to_vec1::<u32>()?)?;
        Ok((batch, len))
    }

    /// Checks that `len` tokens of `batch` sequences fit the model and the cache.
    pub(super) fn check_shape(&self, batch: usize, len: usize, cache: &KvCache) -> Result<()> {
        if batch == 0 || len == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        let (expected, got) = (self.own_kv_heads(), cache.num_kv_heads());
        if got != expected {
            return Err(ModelError::input("KV heads of the KV cache", expected, got));
        }
        if batch != cache.batch() || cache.num_layers() != self.layers.len() {
            let expected = format!("{batch} and {}", self.layers.len());
            let got = format!("{} and {}", cache.batch(), cache.num_layers());
            return Err(ModelError::input("batch and layers of the KV cache", expected, got));
        }
        let got = cache.len().saturating_add(len);
        if got > self.config.max_positions {
            return Err(ModelError::ContextTooLong { expected: self.config.max_positions, got });
        }
        cache.check_room(len)
    }

    /// Refuses ids outside the embedding: on a GPU they would silently read other memory. The check runs on the host,
    /// because the ids are few and the driver would first have to compile Candle's reductions.
    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().copied().max() {
            Some(got) if got as usize >= self.config.vocab_size => {
                Err(ModelError::TokenOutOfRange { expected: self.config.vocab_size, got })
            }
            _ => Ok(()),
        }
    }
}

/// Returns `dtype` if the decoder computes in it.
pub(crate) fn check_dtype(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(dtype),
        other => Err(ModelError::unsupported("dtype", "f32, bf16 or f16", format!("{other:?}"))),
    }
}

/// Refuses linear layers in int8 where they cannot be computed.
pub(super) fn check_linear_precision(config: &DecoderConfig, weights: &Weights) -> Result<()> {
    if weights.linear_precision() != LinearPrecision::Int8 {
        return Ok(());
    }
    let (device, dtype) = (weights.device(), weights.dtype());
    if !supports_int8(device, dtype) {
        return Err(ModelError::Int8Linear {
            expected: INT8_NEEDS,
            got: format!("{} on {:?}", dtype.as_str(), device.location()),
        });
    }
    if weights.are_quantised() {
        let got = weights.precision();
        return Err(ModelError::unsupported("linear layers in int8", "weights in bf16 or f16 (--dtype bf16)", got));
    }
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let fits = |size: &usize| size.is_multiple_of(16) && *size <= INT8_MAX_WIDTH;
    match [config.hidden_size, config.intermediate_size, q, kv].iter().find(|size| !fits(size)) {
        Some(got) => {
            let expected = "sizes that are multiples of 16 up to 32768";
            Err(ModelError::unsupported("linear layers in int8", expected, got))
        }
        None => Ok(()),
    }
}
