//! Exact attention of single rows to given keys by brute force, and the error of an output.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use crate::problem::Problem;

/// Maximum number of multiplications for the reference of one case. Above it, rows are sampled.
const WORK: usize = 4_000_000_000;

/// One row of the output.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub batch: usize,
    pub head: usize,
    pub row: usize,
}

/// Attention of one query to `keys`.
fn attend(problem: &Problem, at: Row, keys: &[u32]) -> Vec<f32> {
    let shape = &problem.shape;
    let d = shape.head_dim();
    let [q, k, v] = &problem.host;
    let q = &q[((at.batch * shape.q_len() + at.row) * shape.num_heads() + at.head) * d..][..d];
    let kv_head = shape.kv_head(at.head);
    let kv = |key: u32| ((at.batch * shape.k_len() + key as usize) * shape.num_kv_heads() + kv_head) * d;
    let scale = problem.score_scale();
    let score = |key: &u32| scale.score(f64::from(dot(q, &k[kv(*key)..][..d]))) as f32;
    let scores: Vec<f32> = keys.iter().map(score).collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut out, mut sum) = (vec![0.0f32; d], 0.0f32);
    for (&key, score) in keys.iter().zip(scores) {
        let weight = (score - max).exp();
        sum += weight;
        out.iter_mut().zip(&v[kv(key)..][..d]).for_each(|(out, v)| *out += weight * v);
    }
    // A row without keys is zero.
    out.iter_mut().for_each(|out| *out /= if keys.is_empty() { 1.0 } else { sum });
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight independent sums: the compiler does not reorder floating-point additions.
    let mut sums = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

/// The rows to check: all rows, or as many as `WORK` allows, spread evenly over heads and length and with the last row.
pub fn rows(problem: &Problem) -> Vec<Row> {
    let shape = &problem.shape;
    let all = shape.batch() * shape.num_heads() * shape.q_len();
    let affordable = (WORK / (2 * shape.k_len() * shape.head_dim())).max(1);
    let step = all.div_ceil(affordable);
    // Coprime with the sizes in use, so that every head and every position in a tile is checked.
    let step = if step > 1 { step | 1 } else { 1 };
    (0..all)
        .step_by(step)
        .chain(std::iter::once(all - 1))
        .map(|i| {
            let (batch_head, row) = (i / shape.q_len(), i % shape.q_len());
            Row { batch: batch_head / shape.num_heads(), head: batch_head % shape.num_heads(), row }
        })
        .collect()
}

/// Compares `out` with attention to the keys that `keys` returns for each row. `keys` may return several lists if more
/// than one result is correct; the nearest result counts.
pub fn check(problem: &Problem, out: &Tensor, keys: impl Fn(Row) -> Vec<Vec<u32>> + Sync) {
    let shape = &problem.shape;
    assert_eq!(out.dims(), [shape.batch(), shape.q_len(), shape.num_heads(), shape.head_dim()]);
    assert_eq!(out.dtype(), problem.dtype);
    let d = shape.head_dim();
    let got: Vec<f32> = out.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    assert!(got.iter().all(|x| x.is_finite()), "an output is not finite");
    let (difference, norm, worst) = rows(problem)
        .into_par_iter()
        .map(|at| {
            let got = &got[((at.batch * shape.q_len() + at.row) * shape.num_heads() + at.head) * d..][..d];
            let errors = keys(at).into_iter().map(|keys| {
                let want = attend(problem, at, &keys);
                let square = |x: f32| f64::from(x) * f64::from(x);
                let difference: f64 = got.iter().zip(&want).map(|(got, want)| square(got - want)).sum();
                (difference, want.iter().map(|&want| square(want)).sum::<f64>())
            });
            let (difference, norm) = errors.min_by(|a, b| a.0.total_cmp(&b.0)).expect("at least one list");
            (difference, norm, if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() })
        })
        .reduce(|| (0.0, 0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1, f64::max(a.2, b.2)));
    let error = (difference / norm).sqrt();
    // Half a unit in the last place of 16 bits, twice: the weights are rounded before the product, and the output.
    let (tolerance, worst_tolerance) = if problem.dtype == DType::BF16 { (5e-3, 2e-2) } else { (8e-4, 4e-3) };
    assert!(error < tolerance && worst < worst_tolerance, "relative error {error:.2e}, of the worst row {worst:.2e}");
}

/// The bits of all elements as f32.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// The elements in f32.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
