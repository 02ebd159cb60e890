//! One query head with its KV head, and its exact attention probabilities.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;
use s2o_eval::capture::LayerTensors;

/// The operands of one query head, in f32 on the CPU.
#[derive(Debug)]
pub struct Head {
    /// (1, q_len, 1, head_dim)
    pub q: Tensor,
    /// (1, k_len, 1, head_dim)
    pub k: Tensor,
    /// (1, k_len, 1, head_dim)
    pub v: Tensor,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
    /// (head_dim, k_len)
    k_transposed: Tensor,
}

impl Head {
    /// A query head of the first sequence.
    pub fn new(layer: &LayerTensors, head: usize) -> Result<Self> {
        let kv_head = head / (layer.q.dim(2)? / layer.k.dim(2)?);
        let only = |tensor: &Tensor, head| {
            let tensor = tensor.narrow(0, 0, 1)?.narrow(2, head, 1)?.to_device(&Device::Cpu)?;
            tensor.to_dtype(DType::F32)?.contiguous()
        };
        let (q, k, v) = (only(&layer.q, head)?, only(&layer.k, kv_head)?, only(&layer.v, kv_head)?);
        let k_transposed = k.squeeze(2)?.squeeze(0)?.t()?.contiguous()?;
        Ok(Self { q, k, v, softmax_scale: layer.softmax_scale, k_transposed })
    }

    pub fn q_len(&self) -> usize {
        self.q.dims()[1]
    }

    pub fn k_len(&self) -> usize {
        self.k.dims()[1]
    }

    pub fn q_offset(&self) -> usize {
        self.k_len() - self.q_len()
    }

    /// For each of `queries`, the probabilities of the keys up to its own position.
    pub fn probabilities(&self, queries: Range<usize>) -> Result<Vec<Vec<f32>>> {
        let rows = self.q.squeeze(2)?.squeeze(0)?.narrow(0, queries.start, queries.len())?;
        let scores = (rows.matmul(&self.k_transposed)? * f64::from(self.softmax_scale))?;
        let mut scores = scores.to_vec2::<f32>()?;
        scores.par_iter_mut().zip(queries).for_each(|(row, query)| {
            row.truncate(self.q_offset() + query + 1);
            softmax(row);
        });
        Ok(scores)
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f64 = scores.iter().copied().map(f64::from).sum();
    scores.iter_mut().for_each(|score| *score = (f64::from(*score) / sum) as f32);
}
