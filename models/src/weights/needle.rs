//! The embedded model, which needs no file, no network and no accepted licence.

use std::str::FromStr;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use s2o_needle_7m::{CONFIG, TOKENIZER};
use tokenizers::Tokenizer;

use super::{NEEDLE_7M, Parts, eos_ids};
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};

/// Prompts with answers, read by [`crate::passkey`].
pub(crate) const PASSKEY_JSONL: &str = include_str!("../../passkey.jsonl");

pub(super) fn open(dtype: DType, device: &Device) -> Result<Parts> {
    Ok(Parts {
        config: DecoderConfig::from_json(CONFIG, NEEDLE_7M)?,
        vb: VarBuilder::from_buffered_safetensors(s2o_needle_7m::safetensors(), dtype, device)?,
        tokenizer: tokenizer()?,
        eos_ids: eos_ids(CONFIG, NEEDLE_7M)?,
    })
}

pub(crate) fn tokenizer() -> Result<Tokenizer> {
    Tokenizer::from_str(TOKENIZER).map_err(ModelError::tokenizer)
}
