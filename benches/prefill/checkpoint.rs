//! The timed checkpoint: a published shape, weights made on the device from a seed, and a prompt.

use anyhow::Result;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use s2o_models::DecoderConfig;
use s2o_models::weights::synthetic::{self, Profile, Shape};

/// The dtype of all timed tensors.
pub const DTYPE: DType = DType::BF16;

/// The kind of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// Attention as peaked as a trained model's.
    Calibrated,
    /// Independent normal weights: attention is near uniform, the worst case.
    Random,
}

impl Weights {
    /// The name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calibrated => "calibrated",
            Self::Random => "random",
        }
    }
}

/// The shape of this name or `config.json`, with `layers` of its layers and positions for at least `tokens` tokens; and
/// synthetic weights under Hugging Face names in bf16 on `device`.
pub fn checkpoint(
    shape: &str,
    weights: Weights,
    layers: Option<usize>,
    tokens: usize,
    device: &Device,
) -> Result<(DecoderConfig, VarBuilder<'static>)> {
    let mut config = shape.parse::<Shape>()?.config()?;
    config.num_layers = layers.unwrap_or(config.num_layers);
    config.max_positions = config.max_positions.max(tokens);
    let profile = match weights {
        Weights::Calibrated => Profile::default(),
        Weights::Random => Profile::Random,
    };
    let vb = synthetic::var_builder(&config, profile, synthetic::SEED, DTYPE, device)?;
    Ok((config, vb))
}

/// Tokens of a prompt, the same for the same vocabulary and length.
pub fn prompt(config: &DecoderConfig, tokens: usize) -> Vec<u32> {
    synthetic::prompt(config.vocab_size, tokens, synthetic::SEED)
}
