//! The metadata of a GGUF file as a [`DecoderConfig`].

use candle_core::quantized::gguf_file::{Content, Value};

use super::{Architecture, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::rope::{RopeConfig, RopeScaling, yarn_scale};

impl DecoderConfig {
    /// Reads the metadata of a GGUF file, with the errors of [`Self::from_json`]. `divisors` of the rotary frequencies
    /// come from a tensor of the file.
    pub(crate) fn from_gguf(content: &Content, divisors: Option<Vec<f32>>, origin: &str) -> Result<Self> {
        let Some(Ok(name)) = content.metadata.get("general.architecture").map(Value::to_string) else {
            return Err(ModelError::config(origin, "general.architecture is missing or not a string"));
        };
        let architecture = Architecture::named(name)?;
        let model = Metadata { content, architecture: name, origin };
        let has = |name: &str| content.tensor_infos.contains_key(name);
        let hidden_size = model.size("embedding_length")?;
        let num_heads = model.size("attention.head_count")?;
        let key_length = model.number("attention.key_length")?;
        let head_dim = match key_length.or(model.number("rope.dimension_count")?) {
            Some(head_dim) => head_dim as usize,
            None => hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = model.number(key)?.filter(|other| *other as usize != head_dim) {
                let reason = format!("{key} is {other}, expected the key length {head_dim}");
                return Err(ModelError::config(origin, reason));
            }
        }
        let embedding = content.tensor_infos.get("token_embd.weight");
        let embedding = embedding.ok_or_else(|| ModelError::MissingTensor { name: "token_embd.weight".to_owned() })?;
        let context = model.size("context_length")?;
        let scaling = match divisors {
            Some(divisors) => RopeScaling::Divisors(divisors),
            None => model.rope_scaling(context)?,
        };
        let config = DecoderConfig {
            architecture,
            vocab_size: embedding.shape.dims().first().copied().unwrap_or(0),
            hidden_size,
            intermediate_size: model.size("feed_forward_length")?,
            num_layers: model.size("block_count")?,
            num_heads,
            num_kv_heads: model.number("attention.head_count_kv")?.map_or(num_heads, |heads| heads as usize),
            head_dim,
            max_positions: context.max(scaling.extended_positions()),
            rms_norm_eps: model.needed("attention.layer_norm_rms_epsilon")?,
            rope: RopeConfig { theta: model.number("rope.freq_base")?.unwrap_or(10_000.0), scaling },
            attention_bias: has("blk.0.attn_q.bias"),
            mlp_bias: has("blk.0.ffn_gate.bias"),
            qk_norm: architecture == Architecture::Qwen3,
            tie_embeddings: !has("output.weight"),
        };
        config.checked(origin)
    }
}

/// Typed access to the metadata of one architecture.
struct Metadata<'a> {
    content: &'a Content,
    /// The prefix of its keys.
    architecture: &'a str,
    /// Names the file in errors.
    origin: &'a str,
}

impl<'a> Metadata<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.content.metadata.get(&format!("{}.{key}", self.architecture))
    }

    fn wrong(&self, key: &str, expected: &str, got: &str) -> ModelError {
        ModelError::config(self.origin, format!("{}.{key}: expected {expected}, got {got}", self.architecture))
    }

    /// `None` if there is no such key.
    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value {
            Value::F32(v) => Ok(Some(f64::from(*v))),
            Value::F64(v) => Ok(Some(*v)),
            Value::I32(v) => Ok(Some(f64::from(*v))),
            Value::I64(v) => Ok(Some(*v as f64)),
            other => match other.to_u64() {
                Ok(v) => Ok(Some(v as f64)),
                Err(_) => Err(self.wrong(key, "a number", &format!("{:?}", other.value_type()))),
            },
        }
    }

    fn needed(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.wrong(key, "a number", "nothing"))
    }

    fn size(&self, key: &str) -> Result<usize> {
        Ok(self.needed(key)? as usize)
    }

    fn rope_scaling(&self, context: usize) -> Result<RopeScaling> {
        const KIND: &str = "rope.scaling.type";
        let name = |value: &'a Value| match value {
            Value::String(name) => Ok(name.as_str()),
            other => Err(self.wrong(KIND, "a name", &format!("{:?}", other.value_type()))),
        };
        match self.get(KIND).map(name).transpose()? {
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: self.needed("rope.scaling.factor")? }),
            Some("yarn") => {
                let factor = self.needed("rope.scaling.factor")?;
                let original = self.number("rope.scaling.original_context_length")?;
                Ok(RopeScaling::Yarn {
                    factor,
                    attention_factor: self.number("rope.scaling.attn_factor")?.unwrap_or(1.0) * yarn_scale(factor, 1.0),
                    beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    truncate: true,
                    original_max_positions: original.map_or(context, |positions| positions as usize),
                })
            }
            Some(other) => Err(ModelError::unsupported(KIND, "none, linear or yarn", other)),
        }
    }
}
