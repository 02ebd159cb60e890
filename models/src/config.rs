//! [`DecoderConfig`]: everything the decoder needs to know about a model, whatever file said it.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::rope::{RopeConfig, RopeScaling};
use crate::{llama, qwen3};

/// The architectures that the one decoder computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2, 3, 3.1, 3.2 and what shares their layout (SmolLM2).
    Llama,
    /// Qwen3, dense.
    Qwen3,
}

impl Architecture {
    /// What [`ModelError::UnsupportedArchitecture`] lists as accepted.
    pub(crate) const ACCEPTED: &'static str = "LlamaForCausalLM or Qwen3ForCausalLM (GGUF: llama or qwen3)";
}

/// Shape and constants of a decoder. `llama.rs` and `qwen3.rs` make it from a `config.json`
/// or from GGUF metadata; nothing behind it asks for the architecture again.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Where the configuration came from.
    pub architecture: Architecture,
    /// Entries of the vocabulary, rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Inner width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key / value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// The longest context, YaRN's extension included.
    pub max_positions: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether the four attention projections have biases.
    pub attention_bias: bool,
    /// Whether the three MLP projections have biases.
    pub mlp_bias: bool,
    /// Whether q and k are RMS-normalised per head before the rotation (Qwen3).
    pub qk_norm: bool,
    /// Whether the output head is the embedding matrix.
    pub tie_embeddings: bool,
}

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`. `origin` names it in errors.
    ///
    /// # Errors
    /// [`ModelError::InvalidConfig`] for malformed or contradictory JSON, [`ModelError::UnsupportedArchitecture`] and
    /// [`ModelError::UnsupportedFeature`] for models that this decoder would compute wrongly.
    pub fn from_json(json: &str, origin: &str) -> Result<Self> {
        let hf: HfConfig = serde_json::from_str(json).map_err(|e| ModelError::config(origin, e))?;
        let config = match hf.architecture_name().as_str() {
            "LlamaForCausalLM" | "llama" => llama::from_hf(&hf, origin)?,
            "Qwen3ForCausalLM" | "qwen3" => qwen3::from_hf(&hf, origin)?,
            other => {
                return Err(ModelError::UnsupportedArchitecture {
                    expected: Architecture::ACCEPTED,
                    got: other.to_owned(),
                });
            }
        };
        config.checked(origin)
    }

    /// Parameters of the model, a tied head counted once.
    pub fn num_parameters(&self) -> usize {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Every weight tensor: its Hugging Face name and shape.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q_size, kv_size) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden])];
        for layer in 0..self.num_layers {
            let mut push = |name: &str, shape: &[usize]| {
                shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            push("input_layernorm.weight", &[hidden]);
            push("post_attention_layernorm.weight", &[hidden]);
            for (name, out, from) in [
                ("q_proj", q_size, hidden),
                ("k_proj", kv_size, hidden),
                ("v_proj", kv_size, hidden),
                ("o_proj", hidden, q_size),
            ] {
                push(&format!("self_attn.{name}.weight"), &[out, from]);
                if self.attention_bias {
                    push(&format!("self_attn.{name}.bias"), &[out]);
                }
            }
            if self.qk_norm {
                push("self_attn.q_norm.weight", &[self.head_dim]);
                push("self_attn.k_norm.weight", &[self.head_dim]);
            }
            for (name, out, from) in
                [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
            {
                push(&format!("mlp.{name}.weight"), &[out, from]);
                if self.mlp_bias {
                    push(&format!("mlp.{name}.bias"), &[out]);
                }
            }
        }
        shapes.push(("model.norm.weight".to_owned(), vec![hidden]));
        if !self.tie_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        shapes
    }

    /// Refuses sizes that no model can have, before anything is allocated from them.
    pub(crate) fn checked(self, origin: &str) -> Result<Self> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::config(origin, format!("{name} is 0")));
        }
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size > u32::MAX as usize) {
            return Err(ModelError::config(origin, format!("{name} is {size}, more than any model has")));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let reason = format!("{} query heads are no multiple of {} KV heads", self.num_heads, self.num_kv_heads);
            return Err(ModelError::config(origin, reason));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ModelError::config(origin, format!("head_dim is {}, expected an even number", self.head_dim)));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(ModelError::config(origin, format!("rms_norm_eps is {}", self.rms_norm_eps)));
        }
        self.rope.check(self.head_dim, origin)?;
        Ok(self)
    }
}

/// The entries of a Hugging Face `config.json` that both architectures share.
#[derive(Debug, Deserialize)]
pub(crate) struct HfConfig {
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(default)]
    model_type: String,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) rope_scaling: Option<Value>,
    /// Where transformers 5 keeps both `rope_theta` and the scaling.
    pub(crate) rope_parameters: Option<Value>,
    pub(crate) attention_bias: Option<bool>,
    pub(crate) mlp_bias: Option<bool>,
    pub(crate) tie_word_embeddings: Option<bool>,
    pub(crate) hidden_act: Option<String>,
    pub(crate) use_sliding_window: Option<bool>,
    pub(crate) sliding_window: Option<usize>,
}

impl HfConfig {
    fn architecture_name(&self) -> String {
        self.architectures.first().unwrap_or(&self.model_type).clone()
    }

    /// The MLP's activation is SiLU or the model is refused.
    pub(crate) fn check_activation(&self) -> Result<()> {
        match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => Ok(()),
            Some(other) => {
                Err(ModelError::UnsupportedFeature { feature: "hidden_act", expected: "silu", got: other.to_owned() })
            }
        }
    }

    /// Base frequency and scaling, from the old and the new place; and the longest context they allow.
    pub(crate) fn rope(&self, default_theta: f64, origin: &str) -> Result<(RopeConfig, usize)> {
        let parameters = self.rope_parameters.as_ref();
        let theta = parameters
            .and_then(|p| p.get("rope_theta"))
            .and_then(Value::as_f64)
            .or(self.rope_theta)
            .unwrap_or(default_theta);
        let scaling = match self.rope_scaling.as_ref().or(parameters) {
            None | Some(Value::Null) => RopeScaling::None,
            Some(value) => RopeScaling::from_json(value, self.max_position_embeddings, origin)?,
        };
        let max_positions = self.max_position_embeddings.max(scaling.extended_positions());
        Ok((RopeConfig { theta, scaling }, max_positions))
    }
}
