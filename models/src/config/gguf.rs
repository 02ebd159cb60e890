//! The metadata of a GGUF file as a [`DecoderConfig`].

use candle_core::quantized::gguf_file::{Content, Value};

use super::{Architecture, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::rope::{RopeConfig, RopeScaling, yarn_scale};

/// Typed access to the metadata of one architecture.
pub(crate) struct GgufMetadata<'a> {
    pub(crate) content: &'a Content,
    /// `general.architecture`, the prefix of its keys.
    pub(crate) architecture: &'a str,
    /// Names the file in errors.
    pub(crate) origin: &'a str,
    /// Divisors of the rotary frequencies, from a tensor of the file.
    pub(crate) divisors: Option<Vec<f32>>,
}

impl GgufMetadata<'_> {
    fn number(&self, key: &str) -> Option<f64> {
        match self.content.metadata.get(&format!("{}.{key}", self.architecture))? {
            Value::F32(v) => Some(f64::from(*v)),
            Value::F64(v) => Some(*v),
            Value::I32(v) => Some(f64::from(*v)),
            Value::I64(v) => Some(*v as f64),
            other => other.to_u64().ok().map(|v| v as f64),
        }
    }

    fn missing(&self, key: &str) -> ModelError {
        ModelError::config(self.origin, format!("{}.{key} is missing or not a number", self.architecture))
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.number(key).map(|v| v as usize).ok_or_else(|| self.missing(key))
    }

    /// The configuration, with the errors of [`DecoderConfig::from_json`].
    pub(crate) fn decoder(&self) -> Result<DecoderConfig> {
        let architecture = Architecture::named(self.architecture)?;
        let has = |name: &str| self.content.tensor_infos.contains_key(name);
        let hidden_size = self.size("embedding_length")?;
        let num_heads = self.size("attention.head_count")?;
        let num_kv_heads = match self.number("attention.head_count_kv") {
            Some(heads) => heads as usize,
            None => num_heads,
        };
        let head_dim = match self.number("attention.key_length").or_else(|| self.number("rope.dimension_count")) {
            Some(head_dim) => head_dim as usize,
            None => hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = self.number(key).filter(|other| *other as usize != head_dim) {
                let reason = format!("{key} is {other}, expected the key length {head_dim}");
                return Err(ModelError::config(self.origin, reason));
            }
        }
        let embedding = self
            .content
            .tensor_infos
            .get("token_embd.weight")
            .ok_or_else(|| ModelError::MissingTensor { name: "token_embd.weight".to_owned() })?;
        let context = self.size("context_length")?;
        let scaling = self.rope_scaling(context)?;
        let config = DecoderConfig {
            architecture,
            vocab_size: embedding.shape.dims().first().copied().unwrap_or(0),
            hidden_size,
            intermediate_size: self.size("feed_forward_length")?,
            num_layers: self.size("block_count")?,
            num_heads,
            num_kv_heads,
            head_dim,
            max_positions: context.max(scaling.extended_positions()),
            rms_norm_eps: self
                .number("attention.layer_norm_rms_epsilon")
                .ok_or_else(|| self.missing("attention.layer_norm_rms_epsilon"))?,
            rope: RopeConfig { theta: self.number("rope.freq_base").unwrap_or(10_000.0), scaling },
            attention_bias: has("blk.0.attn_q.bias"),
            mlp_bias: has("blk.0.ffn_gate.bias"),
            qk_norm: architecture == Architecture::Qwen3,
            tie_embeddings: !has("output.weight"),
        };
        config.checked(self.origin)
    }

    fn rope_scaling(&self, context: usize) -> Result<RopeScaling> {
        if let Some(divisors) = &self.divisors {
            return Ok(RopeScaling::Divisors(divisors.clone()));
        }
        let key = format!("{}.rope.scaling.type", self.architecture);
        let kind = self.content.metadata.get(&key).and_then(|value| value.to_string().ok());
        let factor = || self.number("rope.scaling.factor").ok_or_else(|| self.missing("rope.scaling.factor"));
        match kind.map(String::as_str) {
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
            Some("yarn") => {
                let factor = factor()?;
                let original = self.number("rope.scaling.original_context_length");
                Ok(RopeScaling::Yarn {
                    factor,
                    attention_factor: self.number("rope.scaling.attn_factor").unwrap_or(1.0) * yarn_scale(factor, 1.0),
                    beta_fast: self.number("rope.scaling.yarn_beta_fast").unwrap_or(32.0),
                    beta_slow: self.number("rope.scaling.yarn_beta_slow").unwrap_or(1.0),
                    truncate: true,
                    original_max_positions: original.map_or(context, |positions| positions as usize),
                })
            }
            Some(other) => Err(ModelError::UnsupportedFeature {
                feature: "rope.scaling.type",
                expected: "none, linear or yarn",
                got: other.to_owned(),
            }),
        }
    }
}
