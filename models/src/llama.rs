//! Llama 2, 3, 3.1 and 3.2: their `config.json` or GGUF metadata as a [`DecoderConfig`].

use crate::config::{Architecture, DecoderConfig, HfConfig};
use crate::error::{ModelError, Result};
use crate::weights::GgufMetadata;

/// `rope_theta` of a configuration that does not say (Llama 2 and older).
const DEFAULT_THETA: f64 = 10_000.0;

pub(crate) fn from_hf(hf: &HfConfig, origin: &str) -> Result<DecoderConfig> {
    hf.check_activation()?;
    if let Some(window) = hf.sliding_window.filter(|_| hf.use_sliding_window != Some(false)) {
        return Err(ModelError::UnsupportedFeature {
            feature: "sliding_window",
            expected: "full attention",
            got: window.to_string(),
        });
    }
    let head_dim = match hf.head_dim {
        Some(head_dim) => head_dim,
        None => hf
            .hidden_size
            .checked_div(hf.num_attention_heads)
            .ok_or_else(|| ModelError::config(origin, "num_attention_heads is 0"))?,
    };
    let (rope, max_positions) = hf.rope(DEFAULT_THETA, origin)?;
    Ok(DecoderConfig {
        architecture: Architecture::Llama,
        vocab_size: hf.vocab_size,
        hidden_size: hf.hidden_size,
        intermediate_size: hf.intermediate_size,
        num_layers: hf.num_hidden_layers,
        num_heads: hf.num_attention_heads,
        num_kv_heads: hf.num_key_value_heads.unwrap_or(hf.num_attention_heads),
        head_dim,
        max_positions,
        rms_norm_eps: hf.rms_norm_eps,
        rope,
        attention_bias: hf.attention_bias.unwrap_or(false),
        mlp_bias: hf.mlp_bias.unwrap_or(false),
        qk_norm: false,
        tie_embeddings: hf.tie_word_embeddings.unwrap_or(false),
    })
}

pub(crate) fn from_gguf(metadata: &GgufMetadata) -> Result<DecoderConfig> {
    metadata.decoder(Architecture::Llama, false)
}
