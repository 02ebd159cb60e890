use super::{Head, dot};
use crate::config::{KeyScore, S2oConfig};
use crate::permutation::Permutation;
use crate::plan::SegmentOrder;
use crate::segment::Segment;

/// Algorithm 1 for one segment.
pub fn rank(head: &Head, segment: &Segment, segment_len: usize, config: &S2oConfig) -> SegmentOrder {
    let k_scores = key_scores(head, segment, config);
    // kv_perm = argsort descending, with the front sink and the recent keys above all finite scores
    let lift = |(t, &score): (usize, &f64)| {
        if config.leads(t, k_scores.len()) && score.is_finite() { f64::MAX } else { score }
    };
    let lifted: Vec<f64> = k_scores.iter().enumerate().map(lift).collect();
    let kv_perm = Permutation::argsort_desc(&lifted);
    let q_perm = if config.q_perm() {
        Permutation::argsort_desc(&query_scores(head, segment, segment_len))
    } else {
        Permutation::identity(segment.rows.len())
    };
    SegmentOrder { q_perm, kv_perm }
}

/// `k_scores[t] = scale <q_mean, K[t]>` (plus the variance term) for the keys before the segment.
pub fn key_scores(head: &Head, segment: &Segment, config: &S2oConfig) -> Vec<f64> {
    let (mean, var) = query_moments(head, segment);
    let scale = f64::from(head.scale.softmax_scale);
    (0..segment.start)
        .map(|t| {
            let by_mean = scale * dot(&mean, head.k(t));
            match config.key_score() {
                KeyScore::MeanQuery => by_mean,
                KeyScore::SecondCumulant { c } => {
                    let spread: f64 = var.iter().zip(head.k(t)).map(|(var, k)| var * k * k).sum();
                    by_mean + f64::from(c) * scale * scale * spread
                }
            }
        })
        .collect()
}

/// `q_scores[s] = <Q[s], k_guide>` for the queries outside the dense tail. `k_guide` is the mean of the first segment's
/// keys.
pub fn query_scores(head: &Head, segment: &Segment, segment_len: usize) -> Vec<f64> {
    let guide_len = segment_len.min(head.k.len() / head.head_dim);
    let k_guide: Vec<f64> =
        (0..head.head_dim).map(|d| (0..guide_len).map(|t| head.k(t)[d]).sum::<f64>() / guide_len as f64).collect();
    segment.rows.clone().map(|row| dot(head.q(row), &k_guide)).collect()
}

/// Mean and variance, per dimension, of the segment's queries in this call, including the dense tail.
fn query_moments(head: &Head, segment: &Segment) -> (Vec<f64>, Vec<f64>) {
    moments(head.head_dim, segment.all_rows().map(|row| head.q(row)))
}

/// Mean and variance, per dimension, of the finite vectors.
pub(super) fn moments<'v>(head_dim: usize, vectors: impl Iterator<Item = &'v [f64]> + Clone) -> (Vec<f64>, Vec<f64>) {
    let finite = vectors.filter(|vector| vector.iter().all(|x| x.is_finite()));
    let count = finite.clone().count().max(1) as f64;
    (0..head_dim)
        .map(|d| {
            let mean = finite.clone().map(|vector| vector[d]).sum::<f64>() / count;
            let var = finite.clone().map(|vector| (vector[d] - mean).powi(2)).sum::<f64>() / count;
            (mean, var)
        })
        .unzip()
}
