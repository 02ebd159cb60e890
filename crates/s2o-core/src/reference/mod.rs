//! The reference: Algorithms 1 to 4 in f64, one head at a time, without threads or any blocking outside the algorithm.
//!
//! It is written for line-by-line comparison with the paper. It shares only the decisions (segments, tie rule, stop
//! rule, statistics) with the fast paths.

mod pass1;
mod pass2;
mod probes;
mod ranking;
mod single_pass;

pub use pass1::pass1;
pub use pass2::pass2;
pub use ranking::{key_scores, query_scores, rank};
pub use single_pass::single_pass;

use std::ops::Range;

use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::error_control::ErrorControl;
use crate::online_softmax::SoftmaxState;
use crate::plan::{Plan, Ranking, SegmentOrder};
use crate::probes::{ProbeStats, Repeated};
use crate::score_scale::ScoreScale;
use crate::segment::Segment;
use crate::shape::AttnShape;
use crate::stats::AttnStats;
use probes::correct;

/// One query head with the KV head it reads. Query `i` is at position `q_offset + i`.
#[derive(Debug, Clone)]
pub struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    head_dim: usize,
    scale: ScoreScale,
}

impl Head {
    /// Head `head` of sequence `batch`, from tensors `q` (batch, q_len, num_heads, head_dim) and `k`, `v`
    /// (batch, k_len, num_kv_heads, head_dim), all contiguous.
    ///
    /// # Panics
    /// If a slice is shorter than `shape` requires.
    pub fn new(
        shape: &AttnShape,
        [q, k, v]: [&[f32]; 3],
        scale: impl Into<ScoreScale>,
        batch: usize,
        head: usize,
    ) -> Self {
        let head_dim = shape.head_dim();
        let pick = |data: &[f32], len: usize, num_heads: usize, head: usize| -> Vec<f64> {
            (0..len)
                .flat_map(|s| {
                    let start = ((batch * len + s) * num_heads + head) * head_dim;
                    data[start..start + head_dim].iter().map(|&x| f64::from(x))
                })
                .collect()
        };
        let kv_head = shape.kv_head(head);
        Self {
            q: pick(q, shape.q_len(), shape.num_heads(), head),
            k: pick(k, shape.k_len(), shape.num_kv_heads(), kv_head),
            v: pick(v, shape.k_len(), shape.num_kv_heads(), kv_head),
            head_dim,
            scale: scale.into(),
        }
    }

    fn q(&self, row: usize) -> &[f64] {
        &self.q[row * self.head_dim..][..self.head_dim]
    }

    fn k(&self, position: usize) -> &[f64] {
        &self.k[position * self.head_dim..][..self.head_dim]
    }

    fn v(&self, position: usize) -> &[f64] {
        &self.v[position * self.head_dim..][..self.head_dim]
    }

    fn q_len(&self) -> usize {
        self.q.len() / self.head_dim
    }

    fn q_offset(&self) -> usize {
        (self.k.len() - self.q.len()) / self.head_dim
    }

    fn position(&self, row: usize) -> usize {
        self.q_offset() + row
    }

    /// Score of a query and a key.
    fn score(&self, row: usize, position: usize) -> f64 {
        self.scale.score(dot(self.q(row), self.k(position)))
    }
}

/// A query outside the dense tail after its prefix.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseRow {
    /// The softmax over the visited keys.
    pub state: SoftmaxState,
    /// Whether the query skipped keys.
    pub skips: bool,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Exact causal attention of the queries `rows`: (rows, head_dim). It sweeps the keys twice, without online softmax.
pub fn dense(head: &Head, rows: Range<usize>) -> Vec<f64> {
    rows.flat_map(|row| exact(head, row).0).collect()
}

/// Exact causal attention of one query: its output, and the logarithm of its sum of `exp(score)`.
fn exact(head: &Head, row: usize) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = (0..=head.position(row)).map(|t| head.score(row, t)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mean = |d: usize| weights.iter().enumerate().map(|(t, w)| w * head.v(t)[d]).sum::<f64>() / sum;
    ((0..head.head_dim).map(mean).collect(), max + sum.ln())
}

/// Ranks every segment of `plan`.
pub fn rank_all(head: &Head, plan: &Plan, config: &S2oConfig) -> Vec<SegmentOrder> {
    plan.segments.iter().map(|segment| rank(head, segment, plan.segment_len, config)).collect()
}

/// S2O attention of one head.
struct HeadResult {
    /// (q_len, head_dim)
    out: Vec<f64>,
    /// For each segment the prefix tiles that its query tiles outside the dense tail visited.
    visited: Vec<Vec<usize>>,
    /// For each segment with queries outside the dense tail, if there are probes.
    probes: Vec<ProbeStats>,
}

/// `in_group` is the number of the head among those of its KV head.
fn one_head((head, in_group): (&Head, usize), plan: &Plan, orders: &[SegmentOrder], config: &S2oConfig) -> HeadResult {
    if plan.is_dense() {
        return HeadResult { out: dense(head, 0..head.q_len()), visited: Vec::new(), probes: Vec::new() };
    }
    let mut result = HeadResult { out: vec![0.0; head.q.len()], visited: Vec::new(), probes: Vec::new() };
    let control = ErrorControl::new(config, plan);
    for (segment, order) in plan.segments.iter().zip(orders) {
        write_rows(&mut result.out, segment.tail_rows.clone(), &dense(head, segment.tail_rows.clone()));
        let (mut pass, mut repeated) = (0, Repeated::default());
        let (out, visited) = loop {
            let (mut out, rows, visited) = one_pass(head, segment, order, control.config(pass));
            let Some(stride) = plan.probe_stride.filter(|_| !segment.rows.is_empty()) else { break (out, visited) };
            let stats = correct((head, in_group), segment, &rows, stride, config, &mut out);
            match control.next(pass, &stats) {
                Some(next) => {
                    repeated.add(segment.computed_tiles(&visited, head.q_offset(), config), &stats);
                    pass = next;
                }
                None => {
                    result.probes.push(stats.replacing(repeated));
                    break (out, visited);
                }
            }
        };
        write_rows(&mut result.out, segment.rows.clone(), &out.concat());
        result.visited.push(visited);
    }
    result
}

/// The outputs of a segment's rows outside the dense tail, their states, and the prefix tiles that their tiles visited.
fn one_pass(
    head: &Head,
    segment: &Segment,
    order: &SegmentOrder,
    config: &S2oConfig,
) -> (Vec<Vec<f64>>, Vec<SparseRow>, Vec<usize>) {
    let (rows, visited) = if config.q_perm() {
        let states = pass1(head, segment, config.tile_k());
        pass2(head, segment, states, order, config)
    } else {
        single_pass(head, segment, order, config)
    };
    (rows.iter().map(|row| row.state.finish()).collect(), rows, visited)
}

/// S2O attention of all heads: the output (batch, q_len, num_heads, head_dim) and the statistics. If `ranking` is
/// given, its orders replace Algorithm 1.
///
/// # Errors
/// If `prompt_len` does not fit `shape`, or an order of `ranking` does not fit its segment.
///
/// # Panics
/// If a slice is shorter than `shape` requires.
pub fn attention(
    shape: &AttnShape,
    qkv: [&[f32]; 3],
    scale: impl Into<ScoreScale>,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: Option<&Ranking>,
) -> Result<(Vec<f64>, AttnStats), S2oError> {
    let scale = scale.into();
    let plan = Plan::new(config, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN)?;
    if let Some(given) = ranking.filter(|_| !plan.is_dense()) {
        plan.check_ranking(shape, given)?;
    }
    let (d, heads) = (shape.head_dim(), shape.num_heads());
    let mut out = vec![0.0; shape.batch() * shape.q_len() * heads * d];
    let (mut visited, mut probes) = (Vec::new(), Vec::new());
    for b in 0..shape.batch() {
        for h in 0..heads {
            let (head, number) = (Head::new(shape, qkv, scale, b, h), b * heads + h);
            let of_group = (&head, h % shape.group_size());
            let result = match ranking {
                Some(given) if !plan.is_dense() => one_head(of_group, &plan, &given[number], config),
                _ => one_head(of_group, &plan, &rank_all(&head, &plan, config), config),
            };
            for (s, row) in result.out.chunks_exact(d).enumerate() {
                out[((b * shape.q_len() + s) * heads + h) * d..][..d].copy_from_slice(row);
            }
            visited.push(result.visited);
            probes.push(result.probes);
        }
    }
    let stats = plan.stats(shape, config, |head, segment, tile| visited[head][segment][tile], probes);
    Ok((out, stats))
}

fn write_rows(out: &mut [f64], rows: Range<usize>, values: &[f64]) {
    if !rows.is_empty() {
        let head_dim = values.len() / rows.len();
        out[rows.start * head_dim..rows.end * head_dim].copy_from_slice(values);
    }
}
