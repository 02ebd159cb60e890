//! Qwen3 (dense): its `config.json` or GGUF metadata as a [`DecoderConfig`].

use crate::config::{Architecture, DecoderConfig, HfConfig};
use crate::error::{ModelError, Result};
use crate::weights::GgufMetadata;

/// Head width of a configuration that does not say; Qwen3's is not `hidden_size / num_attention_heads`.
const DEFAULT_HEAD_DIM: usize = 128;
const DEFAULT_THETA: f64 = 10_000.0;

pub(crate) fn from_hf(hf: &HfConfig, origin: &str) -> Result<DecoderConfig> {
    hf.check_activation()?;
    // Published configurations carry a `sliding_window` that this flag switches off.
    if hf.use_sliding_window == Some(true) {
        return Err(ModelError::UnsupportedFeature {
            feature: "use_sliding_window",
            expected: "false",
            got: "true".to_owned(),
        });
    }
    let (rope, max_positions) = hf.rope(DEFAULT_THETA, origin)?;
    Ok(DecoderConfig {
        architecture: Architecture::Qwen3,
        vocab_size: hf.vocab_size,
        hidden_size: hf.hidden_size,
        intermediate_size: hf.intermediate_size,
        num_layers: hf.num_hidden_layers,
        num_heads: hf.num_attention_heads,
        num_kv_heads: hf.num_key_value_heads.unwrap_or(hf.num_attention_heads),
        head_dim: hf.head_dim.unwrap_or(DEFAULT_HEAD_DIM),
        max_positions,
        rms_norm_eps: hf.rms_norm_eps,
        rope,
        attention_bias: hf.attention_bias.unwrap_or(false),
        mlp_bias: false,
        qk_norm: true,
        tie_embeddings: hf.tie_word_embeddings.unwrap_or(false),
    })
}

pub(crate) fn from_gguf(metadata: &GgufMetadata) -> Result<DecoderConfig> {
    metadata.decoder(Architecture::Qwen3, true)
}
