//! Dense attention on the CPU with the features that the fast engine lacks: a plain loop in f32.

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use crate::mask::Window;

/// Parameters of the scores, and of the keys that each query sees.
#[derive(Debug)]
pub(crate) struct Scores {
    pub(crate) softmax_scale: f32,
    pub(crate) window: Window,
    /// ALiBi, by query head.
    pub(crate) slopes: Option<Vec<f32>>,
    pub(crate) softcap: Option<f32>,
    /// Positions whose queries see each other's keys regardless of the window.
    pub(crate) ranges: Vec<(i64, i64)>,
}

impl Scores {
    fn sees(&self, position: i64, key: usize) -> bool {
        let both = |&(start, end): &(i64, i64)| {
            let range = start..end;
            range.contains(&position) && range.contains(&(key as i64))
        };
        self.ranges.iter().any(both)
    }

    fn keys(&self, position: i64, k_len: usize) -> Vec<usize> {
        let window = self.window.keys(position, k_len);
        if self.ranges.is_empty() {
            return window.collect();
        }
        (0..k_len).filter(|key| window.contains(key) || self.sees(position, *key)).collect()
    }

    fn score(&self, dot: f32, head: usize, distance: f32) -> f32 {
        let scaled = dot * self.softmax_scale;
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        self.slopes.as_ref().map_or(capped, |slopes| capped - slopes[head] * distance)
    }
}

/// Attention of checked `q` (batch, q_len, num_heads, head_dim) to `k`, `v` (batch, k_len, num_kv_heads, head_dim).
pub(crate) fn compute(q: &Tensor, k: &Tensor, v: &Tensor, scores: &Scores) -> Result<Tensor> {
    let (_, q_len, num_heads, head_dim) = q.dims4()?;
    let (_, k_len, num_kv_heads, _) = k.dims4()?;
    let group_size = num_heads / num_kv_heads;
    let floats = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (queries, keys, values) = (floats(q)?, floats(k)?, floats(v)?);

    let mut out = vec![0f32; queries.len()];
    let rows = out.par_chunks_mut(head_dim).zip(queries.par_chunks(head_dim)).enumerate();
    rows.for_each(|(row, (out, query))| {
        let (head, token) = (row % num_heads, row / num_heads);
        let (batch, i) = (token / q_len, token % q_len);
        let position = (i + k_len) as i64 - q_len as i64;
        let lane = |key: usize| {
            let start = ((batch * k_len + key) * num_kv_heads + head / group_size) * head_dim;
            start..start + head_dim
        };
        let seen = scores.keys(position, k_len);
        let mut weights: Vec<f32> = seen
            .iter()
            .map(|&key| {
                let dot = query.iter().zip(&keys[lane(key)]).map(|(q, k)| q * k).sum();
                scores.score(dot, head, (position - key as i64).unsigned_abs() as f32)
            })
            .collect();
        let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
        let sum: f32 = weights.iter().sum();
        for (weight, &key) in weights.iter().zip(&seen) {
            for (out, value) in out.iter_mut().zip(&values[lane(key)]) {
                *out += weight / sum * value;
            }
        }
    });
    Tensor::from_vec(out, q.shape(), &Device::Cpu)?.to_dtype(q.dtype())
}
