//! Self-attention of one layer: projections, optional q/k norm, rotation, cache, and then either the plugged prefill
//! method or dense decoding.

use candle_core::{DType, Tensor};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder};
use candle_s2o::{Attention, PrefillCall};

use crate::config::DecoderConfig;
use crate::error::Result;
use crate::kv_cache::KvCache;
use crate::layers::{load_linear, load_norm};
use crate::rope::Rope;

/// How a forward pass attends.
#[derive(Clone, Copy)]
pub(crate) enum Phase<'a> {
    /// A prompt chunk, through the seam.
    Prefill {
        method: &'a dyn Attention,
        /// Tokens of the whole prompt, those in the cache before it included.
        prompt_len: usize,
    },
    /// One token, dense.
    Decode,
}

#[derive(Debug)]
pub(crate) struct SelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    layer: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    softmax_scale: f32,
}

impl SelfAttention {
    pub(crate) fn load(config: &DecoderConfig, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let (hidden, head_dim, bias) = (config.hidden_size, config.head_dim, config.attention_bias);
        let (q_size, kv_size) = (config.num_heads * head_dim, config.num_kv_heads * head_dim);
        let qk_norm = if config.qk_norm {
            let norm = |name: &str| load_norm(head_dim, config.rms_norm_eps, &vb.pp(name));
            Some((norm("q_norm")?, norm("k_norm")?))
        } else {
            None
        };
        Ok(Self {
            q_proj: load_linear(hidden, q_size, bias, &vb.pp("q_proj"))?,
            k_proj: load_linear(hidden, kv_size, bias, &vb.pp("k_proj"))?,
            v_proj: load_linear(hidden, kv_size, bias, &vb.pp("v_proj"))?,
            o_proj: load_linear(q_size, hidden, bias, &vb.pp("o_proj"))?,
            qk_norm,
            layer,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        })
    }

    /// Counted from 0.
    pub(crate) fn layer(&self) -> usize {
        self.layer
    }

    /// `x` is `(batch, len, hidden)`, normalised; `rows` are the table rows of its positions.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rows: &(Tensor, Tensor),
        cache: &mut KvCache,
        phase: Phase,
    ) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let q = self.q_proj.forward(x)?.reshape((batch, len, self.num_heads, self.head_dim))?;
        let k = self.k_proj.forward(x)?.reshape((batch, len, self.num_kv_heads, self.head_dim))?;
        let v = self.v_proj.forward(x)?.reshape((batch, len, self.num_kv_heads, self.head_dim))?;
        let (q, k) = match &self.qk_norm {
            Some((q_norm, k_norm)) => (q_norm.forward(&q)?, k_norm.forward(&k)?),
            None => (q, k),
        };
        let (q, k) = (Rope::rotate(&q, rows)?, Rope::rotate(&k, rows)?);
        let (k, v) = cache.write(self.layer, &k, &v)?;
        let out = match phase {
            Phase::Prefill { method, prompt_len } => {
                let call = PrefillCall { layer: self.layer, softmax_scale: self.softmax_scale, prompt_len };
                method.prefill(&call, &q, &k, &v)?
            }
            Phase::Decode => decode(&q, &k, &v, self.softmax_scale)?,
        };
        Ok(self.o_proj.forward(&out.reshape((batch, len, self.num_heads * self.head_dim))?)?)
    }
}

/// Dense attention of one query per sequence: `q` `(batch, 1, num_heads, head_dim)` against `k`, `v`
/// `(batch, k_len, num_kv_heads, head_dim)`. The query heads of a group are the rows of one matrix, so no KV head is
/// repeated in memory.
pub(crate) fn decode(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32) -> Result<Tensor> {
    let (batch, _, num_heads, head_dim) = q.dims4()?;
    let num_kv_heads = k.dim(2)?;
    let q = q.reshape((batch, num_kv_heads, num_heads / num_kv_heads, head_dim))?;
    let mut rows = Vec::with_capacity(batch);
    // Candle multiplies a batch of matrices with one batch stride only, and (sequence, head) needs two.
    for b in 0..batch {
        let (q, k, v) = (q.get(b)?, k.get(b)?.transpose(0, 1)?, v.get(b)?.transpose(0, 1)?);
        // cuBLAS through Candle takes no row stride other than the row length; the CPU takes any, so it need not copy the
        // cache. There K q^T is up to twice as fast as q K^T, since the long side is then the row side of the product.
        let (scores, v) = if k.device().is_cpu() {
            (k.matmul(&q.t()?)?.t()?.contiguous()?, v)
        } else {
            (q.matmul(&k.contiguous()?.t()?)?, v.contiguous()?)
        };
        let scores = (scores.to_dtype(DType::F32)? * f64::from(softmax_scale))?;
        let weights = candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(v.dtype())?;
        rows.push(weights.matmul(&v)?.flatten_all()?);
    }
    Ok(Tensor::stack(&rows, 0)?.reshape((batch, 1, num_heads, head_dim))?)
}
