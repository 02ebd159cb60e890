//! Self-attention of one layer: projections, optional q/k norm, rotation, cache, and the given prefill method or
//! decoding.

use candle_core::Tensor;
use candle_nn::{Linear, Module, VarBuilder};
use candle_s2o::{Attention, PrefillCall};

use crate::config::DecoderConfig;
use crate::decode::decode_attn;
use crate::error::Result;
use crate::fused::{self, Heads, QkNorm, Rotation, StackedLinear};
use crate::kv_cache::KvCache;
use crate::layers::{load_linear, load_tensor};

/// The attention of a forward pass.
#[derive(Clone, Copy)]
pub(crate) enum Phase<'a> {
    /// A prompt chunk, with attention by `method`.
    Prefill {
        method: &'a dyn Attention,
        /// Tokens of the whole prompt, including those already in the cache.
        prompt_len: usize,
    },
    /// One token, with dense attention.
    Decode,
}

#[derive(Debug)]
pub(crate) struct SelfAttention {
    qkv: StackedLinear,
    o_proj: Linear,
    qk_norm: Option<(Tensor, Tensor)>,
    norm_eps: f64,
    layer: usize,
    heads: Heads,
    softmax_scale: f32,
}

impl SelfAttention {
    pub(crate) fn load(config: &DecoderConfig, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let &DecoderConfig { num_heads, num_kv_heads, head_dim, hidden_size, attention_bias: bias, .. } = config;
        let (q_size, kv_size) = (num_heads * head_dim, num_kv_heads * head_dim);
        let projection = |name: &str, size: usize| load_linear(hidden_size, size, bias, &vb.pp(name));
        let norm = |name: &str| load_tensor(&[head_dim], "weight", &vb.pp(name));
        let qk_norm = if config.qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None };
        let (q, k, v) = (projection("q_proj", q_size)?, projection("k_proj", kv_size)?, projection("v_proj", kv_size)?);
        Ok(Self {
            qkv: StackedLinear::new(vec![q, k, v])?,
            o_proj: load_linear(q_size, hidden_size, bias, &vb.pp("o_proj"))?,
            qk_norm,
            norm_eps: config.rms_norm_eps,
            layer,
            heads: Heads { num_heads, num_kv_heads, head_dim },
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        })
    }

    /// Index of the layer, from 0.
    pub(crate) fn layer(&self) -> usize {
        self.layer
    }

    /// `x` is `(batch, len, hidden)`, normalised; `rotation` is that of its positions.
    pub(crate) fn forward(&self, x: Tensor, rotation: &Rotation, cache: &mut KvCache, phase: Phase) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let qkv = self.qkv.forward(&x)?;
        // Frees memory for the workspace of attention.
        drop(x);
        let norm = self.qk_norm.as_ref().map(|(q, k)| QkNorm { q, k, eps: self.norm_eps });
        let q = fused::rotate_into_cache(qkv, self.heads, norm, rotation, cache.end_of(self.layer))?;
        let (k, v) = cache.with_new(self.layer, len)?;
        let out = match phase {
            Phase::Prefill { method, prompt_len } => {
                let call = PrefillCall { layer: self.layer, softmax_scale: self.softmax_scale, prompt_len };
                method.prefill(&call, &q, &k, &v)?
            }
            Phase::Decode => decode_attn(&q, &k, &v, self.softmax_scale)?,
        };
        drop(q);
        Ok(self.o_proj.forward(&out.reshape((batch, len, self.heads.num_heads * self.heads.head_dim))?)?)
    }
}
