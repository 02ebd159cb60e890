//! [`DecoderConfig`]: the shape and constants of a decoder, read from any supported file format.

use crate::error::{ModelError, Result};
use crate::rope::RopeConfig;

mod gguf;
mod hf;

/// The architectures that the decoder supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2, 3, 3.1, 3.2 and models with the same layout (SmolLM2).
    Llama,
    /// Qwen3, dense.
    Qwen3,
}

impl Architecture {
    /// Looks up the name in `architectures` or `model_type` of a `config.json`, or in the metadata of a GGUF file.
    fn named(name: &str) -> Result<Self> {
        match name {
            "LlamaForCausalLM" | "llama" => Ok(Self::Llama),
            "Qwen3ForCausalLM" | "qwen3" => Ok(Self::Qwen3),
            other => Err(ModelError::UnsupportedArchitecture {
                expected: "LlamaForCausalLM or Qwen3ForCausalLM (GGUF: llama or qwen3)",
                got: other.to_owned(),
            }),
        }
    }
}

/// Shape and constants of a decoder, made from a `config.json` ([`DecoderConfig::from_json`]) or from GGUF metadata.
/// The forward pass depends on these values only.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// The architecture that the configuration names.
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
    /// Number of parameters; a tied head counts once.
    pub fn num_parameters(&self) -> usize {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Number of weights of the linear layers: all but embedding, output head and norms.
    pub(crate) fn linear_parameters(&self) -> usize {
        let shapes = self.tensor_shapes().into_iter().filter(|(name, _)| name.ends_with("_proj.weight"));
        shapes.map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Hugging Face name and shape of every weight tensor.
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

    /// Refuses impossible sizes before anything is allocated from them.
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
        /// More layers than any model has.
        const MOST_LAYERS: usize = 1024;
        let zero = sizes.iter().find(|(_, size)| *size == 0);
        let huge = sizes.iter().find(|(_, size)| *size > u32::MAX as usize);
        let Self { num_heads, num_kv_heads, head_dim, rms_norm_eps, .. } = self;
        let reason = match (zero, huge) {
            (Some((name, _)), _) => format!("{name} is 0"),
            (_, Some((name, size))) => format!("{name} is {size}, more than any model has"),
            _ if self.num_layers > MOST_LAYERS => {
                format!("num_hidden_layers is {}, expected at most {MOST_LAYERS}", self.num_layers)
            }
            _ if !num_heads.is_multiple_of(num_kv_heads) => {
                format!("{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
            }
            _ if !head_dim.is_multiple_of(2) => format!("head_dim is {head_dim}, expected an even number"),
            // A larger value would turn every norm into zeros.
            _ if !(0.0..=0.1).contains(&rms_norm_eps) => {
                format!("rms_norm_eps is {rms_norm_eps}, expected a number from 0 to 0.1")
            }
            _ => {
                self.rope.check(head_dim, origin)?;
                return Ok(self);
            }
        };
        Err(ModelError::config(origin, reason))
    }
}
