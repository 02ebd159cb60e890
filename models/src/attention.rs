//! Self-attention of one layer: projections, optional q/k norm, rotation, cache, and the given prefill method or
//! decoding.

use candle_core::{DType, Tensor};
use candle_s2o::{Attention, PrefillCall};

use crate::config::DecoderConfig;
use crate::error::Result;
use crate::fused::{self, Heads, Linear, QkNorm, Rotation, Rows, Stacked, StackedLinear};
use crate::head_tiles::ranges;
use crate::kv_cache::KvCache;
use crate::layers::{Residual, Shared, Weights};
use crate::matrix::Matrix;
use crate::parallel::{Mode, Parallel, Shards};
#[cfg(feature = "cuda")]
use {
    crate::fused::{supports, supports_head_dim},
    candle_s2o::{Mask, dense_attn},
};

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
    /// For this rank's heads.
    qkv: StackedLinear,
    /// In sequence parallelism: for the heads of every rank; `qkv` is one of them.
    qkv_by_rank: Vec<StackedLinear>,
    /// In sequence parallelism: where the ranks have the KV heads.
    slots: Option<Tensor>,
    o_proj: Shared<Linear>,
    qk_norm: Option<(Tensor, Tensor)>,
    norm_eps: f64,
    layer: usize,
    /// This rank's heads.
    heads: Heads,
    softmax_scale: f32,
}

impl SelfAttention {
    pub(crate) fn load(
        config: &DecoderConfig,
        layer: usize,
        weights: &Weights,
        parallel: Option<&Parallel>,
    ) -> Result<Self> {
        let &DecoderConfig { num_heads, num_kv_heads, head_dim, hidden_size, attention_bias: bias, .. } = config;
        let q_size = num_heads * head_dim;
        let norm = |name: &str| weights.pp(name).tensor(&[head_dim], "weight");
        let qk_norm = if config.qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None };
        let precision = weights.linear_precision();
        let (qkv, qkv_by_rank) = load_qkv(config, layer, weights, parallel)?;
        let o_proj = weights.matrix("o_proj", q_size, hidden_size, bias);
        let ranks = parallel.map_or(1, Parallel::world_size);
        let slots = |parallel: &Parallel| {
            let slots = parallel.slots(layer, num_kv_heads).into_iter().map(|slot| slot as u32);
            Tensor::from_iter(slots, weights.device())
        };
        let group = num_heads / num_kv_heads * head_dim;
        let own = |parallel: &Parallel| {
            let heads = parallel.kv_heads_of(parallel.comm().rank(), layer, num_kv_heads);
            Ok(o_proj.inputs_in(&ranges(&heads, group))?.in_precision(precision)?)
        };
        Ok(Self {
            qkv,
            qkv_by_rank,
            slots: parallel.filter(|parallel| parallel.mode() == Mode::Sequence).map(slots).transpose()?,
            o_proj: Shared::new(parallel, || Ok(o_proj.whole()?.in_precision(precision)?), own)?,
            qk_norm,
            norm_eps: config.rms_norm_eps,
            layer,
            heads: Heads { num_heads: num_heads / ranks, num_kv_heads: num_kv_heads / ranks, head_dim },
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        })
    }

    /// Index of the layer, from 0.
    pub(crate) fn layer(&self) -> usize {
        self.layer
    }

    /// Whether inputs may be quantised by the step that computes them.
    pub(crate) fn takes_int8(&self) -> bool {
        self.qkv.takes_int8()
    }

    /// The call of the attention method for this layer.
    pub(crate) fn call(&self, prompt_len: usize) -> PrefillCall {
        PrefillCall { layer: self.layer, softmax_scale: self.softmax_scale, prompt_len }
    }

    /// The queries `(batch, len, num_heads, head_dim)` of all tokens; their keys and values go to the cache. `x` is
    /// `(batch, len, hidden)`, normalised: all tokens, or the own ones of `shards`. `rotation` is that of all.
    pub(crate) fn project(
        &self,
        x: Rows,
        rotation: &Rotation,
        cache: &mut KvCache,
        shards: Option<Shards>,
    ) -> Result<Tensor> {
        let qkv = match shards {
            None => self.qkv.forward(&x)?,
            Some(shards) => {
                let outputs = self.qkv_by_rank.iter().map(|qkv| Ok(qkv.forward(&x)?.into_joined()?));
                let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
                let sizes = [num_heads, num_kv_heads, num_kv_heads].map(|heads| heads * head_dim);
                Stacked::joined(shards.to_heads(&outputs.collect::<Result<Vec<_>>>()?)?, &sizes)?
            }
        };
        // Frees memory for the workspace of attention.
        drop(x);
        let norm = self.qk_norm.as_ref().map(|(q, k)| QkNorm { q, k, eps: self.norm_eps });
        cache.write(self.layer, |cache| fused::rotate_into_cache(qkv, self.heads, norm, rotation, cache))
    }

    /// Attends with the queries `(batch, q_len, num_heads, head_dim)` of the last `q_len` of the chunk's `len` tokens. Returns
    /// the residual stream `sum` `(batch, q_len, hidden)` of these tokens with the output. With the queries of all tokens of
    /// `shards`, `sum` and output are those of the own tokens.
    pub(crate) fn attend(
        &self,
        sum: Tensor,
        q: Tensor,
        len: usize,
        cache: &mut KvCache,
        phase: Phase,
        shards: Option<Shards>,
    ) -> Result<Residual> {
        let (batch, q_len, ..) = q.dims4()?;
        let out = match phase {
            Phase::Prefill { method, prompt_len } => {
                let (k, v) = cache.with_new(self.layer, len)?;
                method.prefill(&self.call(prompt_len), &q, &k, &v)?
            }
            Phase::Decode => self.decode(&q, len, cache)?,
        };
        drop(q);
        let out = out.reshape((batch, q_len, self.heads.num_heads * self.heads.head_dim))?;
        let out = match (shards, &self.slots) {
            (Some(shards), Some(slots)) if q_len < len => shards.of_all_heads(&out, slots)?,
            (Some(shards), Some(slots)) => shards.to_tokens(&out, slots)?,
            _ => out,
        };
        match self.o_proj.complete(shards) {
            Some(o_proj) => Residual::after(sum, o_proj, &out),
            None => Ok(Residual::new(sum, self.o_proj.of_part(|o_proj| Ok(o_proj.forward(&out)?))?)),
        }
    }
}

impl SelfAttention {
    fn decode(&self, q: &Tensor, len: usize, cache: &KvCache) -> Result<Tensor> {
        if let Some([k, v]) = cache.int8(self.layer)
            && let Some(out) = fused::decode_attn_int8(q, [k, v], cache.len() + len, self.softmax_scale)?
        {
            return Ok(out);
        }
        let (k, v) = cache.with_new(self.layer, len)?;
        Ok(decode_attn(q, &k, &v, self.softmax_scale)?)
    }
}

/// The projections of queries, keys and values for this rank's heads, and in sequence parallelism those of every rank.
fn load_qkv(
    config: &DecoderConfig,
    layer: usize,
    weights: &Weights,
    parallel: Option<&Parallel>,
) -> Result<(StackedLinear, Vec<StackedLinear>)> {
    let (q_size, kv_size) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let projection = |name, size| weights.matrix(name, config.hidden_size, size, config.attention_bias);
    let (q, k, v) = (projection("q_proj", q_size), projection("k_proj", kv_size), projection("v_proj", kv_size));
    let stacked = |layers| Ok(StackedLinear::new(layers)?.in_precision(weights.linear_precision())?);
    let Some(parallel) = parallel else {
        return Ok((stacked(vec![q.whole()?, k.whole()?, v.whole()?])?, Vec::new()));
    };
    let of_rank = |rank: usize| -> Result<StackedLinear> {
        let heads = parallel.kv_heads_of(rank, layer, config.num_kv_heads);
        let part = |x: &Matrix, size| x.outputs_in(&ranges(&heads, size / config.num_kv_heads));
        stacked(vec![part(&q, q_size)?, part(&k, kv_size)?, part(&v, kv_size)?])
    };
    let own = parallel.comm().rank();
    match parallel.mode() {
        Mode::Sequence => {
            let all = (0..parallel.world_size()).map(of_rank).collect::<Result<Vec<_>>>()?;
            Ok((all[own].clone(), all))
        }
        Mode::Tensor | Mode::Auto => Ok((of_rank(own)?, Vec::new())),
    }
}

/// Dense attention of one query per sequence: `q` `(batch, 1, num_heads, head_dim)` against `k` and `v` `(batch, k_len,
/// num_kv_heads, head_dim)`, for example views of a cache. Returns the shape of `q`. No KV head is repeated in memory,
/// and on a GPU (bf16 or f16, head_dim 64 or 128) the cache is read in place.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn decode_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32) -> candle_core::Result<Tensor> {
    let dims = q.dims4()?;
    let (batch, _, num_heads, head_dim) = dims;
    #[cfg(feature = "cuda")]
    if supports(q.device(), q.dtype()) && supports_head_dim(head_dim) {
        return Ok(dense_attn(q, k, v, softmax_scale, Mask::Causal)?);
    }
    let num_kv_heads = k.dim(2)?;
    let q = q.reshape((batch, num_kv_heads, num_heads / num_kv_heads, head_dim))?;
    let mut rows = Vec::with_capacity(batch);
    // The query heads of a group are the rows of one matrix. Candle multiplies a batch of matrices with one batch
    // stride only, and (sequence, head) needs two.
    for b in 0..batch {
        let (q, k, v) = (q.get(b)?, k.get(b)?.transpose(0, 1)?, v.get(b)?.transpose(0, 1)?);
        // cuBLAS through Candle needs the row length as row stride; the CPU accepts any stride, so the cache is not
        // copied there. On the CPU, K q^T is up to twice as fast as q K^T, since its long side is the row side.
        let (scores, v) = if k.device().is_cpu() {
            (k.matmul(&q.t()?)?.t()?.contiguous()?, v)
        } else {
            (q.matmul(&k.contiguous()?.t()?)?, v.contiguous()?)
        };
        let scores = (scores.to_dtype(DType::F32)? * f64::from(softmax_scale))?;
        let weights = candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(v.dtype())?;
        rows.push(weights.matmul(&v)?.flatten_all()?);
    }
    Tensor::stack(&rows, 0)?.reshape(dims)
}
