//! A Hugging Face `config.json` as a [`DecoderConfig`].

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Architecture, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::rope::{RopeConfig, RopeScaling};

/// Default of the base frequency.
const DEFAULT_THETA: f64 = 10_000.0;
/// Default head width of Qwen3, which is not `hidden_size / num_attention_heads`.
const QWEN3_HEAD_DIM: usize = 128;

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`. `origin` names it in errors.
    ///
    /// # Errors
    /// [`ModelError::InvalidConfig`] for malformed or contradictory JSON, [`ModelError::UnsupportedArchitecture`] and
    /// [`ModelError::UnsupportedFeature`] for models that this decoder would compute wrongly.
    pub fn from_json(json: &str, origin: &str) -> Result<Self> {
        let hf: HfConfig = serde_json::from_str(json).map_err(|e| ModelError::config(origin, e))?;
        hf.decoder(origin)?.checked(origin)
    }
}

/// The entries of a `config.json`.
#[derive(Debug, Deserialize)]
struct HfConfig {
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(default)]
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    #[serde(default, deserialize_with = "with_null")]
    rope_theta: Option<Value>,
    rope_scaling: Option<Value>,
    /// Holds both `rope_theta` and the scaling in transformers 5.
    rope_parameters: Option<Value>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    quantization_config: Option<Value>,
}

/// A value that is there, `null` included: `None` alone means that there is none.
fn with_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

impl HfConfig {
    fn decoder(&self, origin: &str) -> Result<DecoderConfig> {
        let architecture = Architecture::named(self.architectures.first().unwrap_or(&self.model_type))?;
        self.check(architecture)?;
        let head_dim = match (self.head_dim, architecture) {
            (Some(head_dim), _) => head_dim,
            (None, Architecture::Qwen3) => QWEN3_HEAD_DIM,
            (None, Architecture::Llama) => self
                .hidden_size
                .checked_div(self.num_attention_heads)
                .ok_or_else(|| ModelError::config(origin, "num_attention_heads is 0"))?,
        };
        let (rope, max_positions) = self.rope(origin)?;
        Ok(DecoderConfig {
            architecture,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_layers: self.num_hidden_layers,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            max_positions,
            rms_norm_eps: self.rms_norm_eps,
            rope,
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: architecture == Architecture::Llama && self.mlp_bias.unwrap_or(false),
            qk_norm: architecture == Architecture::Qwen3,
            tie_embeddings: self.tie_word_embeddings.unwrap_or(false),
        })
    }

    /// Refuses models whose MLP activation is not SiLU, whose attention is limited to a window, or whose weights are
    /// quantised: without their scales the weights would give garbage.
    fn check(&self, architecture: Architecture) -> Result<()> {
        if let Some(quantization) = &self.quantization_config {
            let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("another method");
            let expected = "weights in f32, f16 or bf16 (or a GGUF file of the model)";
            return Err(ModelError::unsupported("quantization_config", expected, method));
        }
        let (feature, expected, got) = match (architecture, self.hidden_act.as_deref(), self.sliding_window) {
            (_, Some(other), _) if !matches!(other, "silu" | "swish") => ("hidden_act", "silu", other.to_owned()),
            // Published configurations carry a `sliding_window` that this flag switches off.
            (Architecture::Qwen3, ..) if self.use_sliding_window == Some(true) => {
                ("use_sliding_window", "false", "true".to_owned())
            }
            (Architecture::Llama, _, Some(window)) if self.use_sliding_window != Some(false) => {
                ("sliding_window", "full attention", window.to_string())
            }
            _ => return Ok(()),
        };
        Err(ModelError::unsupported(feature, expected, got))
    }

    /// Base frequency and scaling, from the old or the new entries, and the longest context that they allow.
    fn rope(&self, origin: &str) -> Result<(RopeConfig, usize)> {
        let parameters = self.rope_parameters.as_ref();
        let theta = match parameters.and_then(|p| p.get("rope_theta")).or(self.rope_theta.as_ref()) {
            None => DEFAULT_THETA,
            Some(theta) => theta
                .as_f64()
                .ok_or_else(|| ModelError::config(origin, format!("rope_theta: expected a number, got {theta}")))?,
        };
        let scaling = match self.rope_scaling.as_ref().or(parameters) {
            None | Some(Value::Null) => RopeScaling::None,
            Some(value) => RopeScaling::from_json(value, self.max_position_embeddings, origin)?,
        };
        let max_positions = self.max_position_embeddings.max(scaling.extended_positions());
        Ok((RopeConfig { theta, scaling }, max_positions))
    }
}
