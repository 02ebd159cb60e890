//! Candle's own `llama` and `qwen3` on the weights of a checkpoint: the whole prompt in one forward pass, as their
//! users run it.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, qwen3};
use s2o_models::rope::RopeScaling;
use s2o_models::{Architecture, DecoderConfig};

/// A model and its state between calls.
pub enum Stock {
    /// The caller owns its cache.
    Llama {
        model: Box<llama::Llama>,
        config: Box<llama::Config>,
        cache: Box<llama::Cache>,
        dtype: DType,
        device: Device,
    },
    /// The model owns its cache.
    Qwen3(Box<qwen3::ModelForCausalLM>),
}

impl Stock {
    /// Builds the model with flash attention on.
    pub fn load(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let (dtype, device) = (vb.dtype(), vb.device().clone());
        match config.architecture {
            Architecture::Llama => {
                let config = Box::new(llama_config(config)?);
                let cache = Box::new(llama::Cache::new(true, dtype, &config, &device)?);
                let model = Box::new(llama::Llama::load(vb, &config)?);
                Ok(Self::Llama { model, config, cache, dtype, device })
            }
            Architecture::Qwen3 => {
                let config = qwen3_config(config)?;
                Ok(Self::Qwen3(Box::new(qwen3::ModelForCausalLM::new(&config, vb)?)))
            }
        }
    }

    /// The name in rows.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Llama { .. } => "candle_transformers::models::llama",
            Self::Qwen3(_) => "candle_transformers::models::qwen3",
        }
    }

    /// Clears keys and values.
    pub fn clear(&mut self) -> Result<()> {
        match self {
            Self::Llama { config, cache, dtype, device, .. } => {
                **cache = llama::Cache::new(true, *dtype, config, device)?;
            }
            Self::Qwen3(model) => model.clear_kv_cache(),
        }
        Ok(())
    }

    /// Logits `(vocab_size)` of the last of tokens `(1, len)`, in f32. Call [`Stock::clear`] before.
    pub fn prefill(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let logits = match self {
            Self::Llama { model, cache, .. } => model.forward(tokens, 0, cache)?,
            Self::Qwen3(model) => model.forward(tokens, 0)?,
        };
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?)
    }
}

fn llama_config(config: &DecoderConfig) -> Result<llama::Config> {
    let rope_scaling = match &config.rope.scaling {
        RopeScaling::None => None,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            Some(llama::Llama3RopeConfig {
                factor: *factor as f32,
                low_freq_factor: *low_freq_factor as f32,
                high_freq_factor: *high_freq_factor as f32,
                original_max_position_embeddings: *original_max_positions,
                rope_type: llama::Llama3RopeType::Llama3,
            })
        }
        other => bail!("stock llama: expected rope scaling llama3 or none, got {other:?}"),
    };
    Ok(llama::Config {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        num_hidden_layers: config.num_layers,
        num_attention_heads: config.num_heads,
        num_key_value_heads: config.num_kv_heads,
        use_flash_attn: true,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope.theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling,
        max_position_embeddings: config.max_positions,
        tie_word_embeddings: config.tie_embeddings,
    })
}

fn qwen3_config(config: &DecoderConfig) -> Result<qwen3::Config> {
    if config.rope.scaling != RopeScaling::None {
        bail!("stock qwen3: expected no rope scaling, got {:?}", config.rope.scaling);
    }
    Ok(qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers,
        num_attention_heads: config.num_heads,
        head_dim: config.head_dim,
        attention_bias: config.attention_bias,
        num_key_value_heads: config.num_kv_heads,
        max_position_embeddings: config.max_positions,
        sliding_window: None,
        max_window_layers: config.num_layers,
        tie_word_embeddings: config.tie_embeddings,
        rope_theta: config.rope.theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    })
}
