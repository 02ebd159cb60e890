use std::ops::Range;

use super::Head;

/// Exact causal attention of the queries `rows`: (rows, head_dim). It sweeps the keys twice, without online softmax.
pub fn dense(head: &Head, rows: Range<usize>) -> Vec<f64> {
    let mut out = Vec::with_capacity(rows.len() * head.head_dim);
    for row in rows {
        let scores: Vec<f64> = (0..=head.position(row)).map(|t| head.score(row, t)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..head.head_dim {
            out.push(weights.iter().enumerate().map(|(t, w)| w * head.v(t)[d]).sum::<f64>() / sum);
        }
    }
    out
}
