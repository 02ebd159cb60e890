//! Attention of one new token per sequence.

use candle_core::{DType, Result, Tensor};

#[cfg(feature = "cuda")]
use {
    crate::fused::{supports, supports_head_dim},
    candle_s2o::{Mask, dense_attn},
};

/// Dense attention of one query per sequence: `q` `(batch, 1, num_heads, head_dim)` against `k` and `v` `(batch, k_len,
/// num_kv_heads, head_dim)`, for example views of a cache. Returns the shape of `q`. No KV head is repeated in memory,
/// and on a GPU (bf16 or f16, head_dim 64 or 128) the cache is read in place.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn decode_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32) -> Result<Tensor> {
    let (batch, _, num_heads, head_dim) = q.dims4()?;
    let num_kv_heads = k.dim(2)?;
    let group = num_heads / num_kv_heads;
    #[cfg(feature = "cuda")]
    if supports(q.device(), q.dtype()) && supports_head_dim(head_dim) {
        if k.dim(1)? < group {
            return Ok(dense_attn(q, k, v, softmax_scale, Mask::Causal)?);
        }
        // The heads of a group act as positions that see all keys, so the cache is read once per group. The groups act
        // as a batch, so the output needs no reordering.
        let groups = |x: Tensor| x.transpose(0, 1)?.unsqueeze(2);
        let of_sequence = |b: usize| {
            let q = q.get(b)?.reshape((num_kv_heads, group, 1, head_dim))?;
            let out = dense_attn(&q, &groups(k.get(b)?)?, &groups(v.get(b)?)?, softmax_scale, Mask::Full)?;
            out.reshape((1, 1, num_heads, head_dim))
        };
        return match batch {
            1 => of_sequence(0),
            _ => Tensor::cat(&(0..batch).map(of_sequence).collect::<Result<Vec<_>>>()?, 0),
        };
    }
    let q = q.reshape((batch, num_kv_heads, group, head_dim))?;
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
    Tensor::stack(&rows, 0)?.reshape((batch, 1, num_heads, head_dim))
}
