//! The checkpoint that is timed: a published shape, its weights made on the device from a seed, and a prompt.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use s2o_models::DecoderConfig;

/// The dtype of everything that is timed.
pub const DTYPE: DType = DType::BF16;
const SEED: u64 = 299_792_458;

const LLAMA_3_1_8B: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "tie_word_embeddings": false
}"#;

const QWEN3_8B: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": false,
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": false
}"#;

/// Which weights a checkpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// Attention as peaked as a trained model's.
    Calibrated,
    /// Normal: attention is near uniform, the worst case.
    Random,
}

impl Weights {
    /// As rows name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calibrated => "calibrated",
            Self::Random => "random",
        }
    }
}

/// Shape `llama-3.1-8b`, `qwen3-8b` or a `config.json`, with `layers` of its layers, and positions for `tokens` where it
/// has fewer; and weights under Hugging Face names in bf16 on `device`.
pub fn checkpoint(
    shape: &str,
    weights: Weights,
    layers: Option<usize>,
    tokens: usize,
    device: &Device,
) -> Result<(DecoderConfig, VarBuilder<'static>)> {
    let json = match shape {
        "llama-3.1-8b" => LLAMA_3_1_8B.to_owned(),
        "qwen3-8b" => QWEN3_8B.to_owned(),
        path => fs::read_to_string(path)
            .with_context(|| format!("--shape: expected llama-3.1-8b, qwen3-8b or a config.json, got {path}"))?,
    };
    let mut config = DecoderConfig::from_json(&json, shape)?;
    config.num_layers = layers.unwrap_or(config.num_layers);
    config.max_positions = config.max_positions.max(tokens);
    let tensors = match weights {
        Weights::Calibrated => bail!("--weights: expected random, got calibrated, which this build does not make"),
        Weights::Random => random(&config, device)?,
    };
    Ok((config, VarBuilder::from_tensors(tensors, DTYPE, device)))
}

/// Standard deviation `1 / sqrt(fan_in)`, so that activations keep their size through the layers.
fn random(config: &DecoderConfig, device: &Device) -> Result<HashMap<String, Tensor>> {
    // Candle's generator for the CPU takes no seed; nothing that is recorded runs there.
    if !device.is_cpu() {
        device.set_seed(SEED)?;
    }
    let tensors = config.tensor_shapes().into_iter().map(|(name, shape)| {
        let tensor = match shape.as_slice() {
            [_, fan_in] => Tensor::randn(0f32, (*fan_in as f32).sqrt().recip(), shape, device)?.to_dtype(DTYPE)?,
            _ if name.ends_with("norm.weight") => Tensor::ones(shape, DTYPE, device)?,
            _ => Tensor::zeros(shape, DTYPE, device)?,
        };
        Ok((name, tensor))
    });
    tensors.collect()
}

/// Tokens of a prompt, the same for the same vocabulary and length.
pub fn prompt(config: &DecoderConfig, tokens: usize) -> Vec<u32> {
    let mut state = SEED;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % config.vocab_size as u64) as u32
    };
    (0..tokens).map(|_| draw()).collect()
}
