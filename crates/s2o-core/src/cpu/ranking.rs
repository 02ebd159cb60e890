//! Algorithm 1 on the CPU: all heads that share a KV head, and several segments, read the keys together.

use std::ops::Range;

use rayon::prelude::*;

use super::microkernel;
use super::moments::Moments;
use super::segment_group::SegmentHeads;
use super::softmax::LANES;
use super::strided::{Element, Inputs};
use crate::config::{KeyScore, S2oConfig};
use crate::permutation::{Permutation, sort_by_score, sort_key};
use crate::plan::{Plan, SegmentOrder};
use crate::segment::{Segment, query_tiles};

/// Number of segments whose keys are scored together: many, so that each read of a key serves many rows; not too many,
/// because the sort keys of every task in progress are in memory.
const SEGMENTS_PER_TASK: usize = 16;
/// Number of keys scored, or queries averaged, at a time.
const ROWS_AT_A_TIME: usize = 128;

/// Ranks segments. Returns `orders[i][g]` for `segments[i]` and the `g`-th of its heads.
pub(super) fn rank<T: Element>(
    inputs: &Inputs<'_, T>,
    plan: &Plan,
    config: &S2oConfig,
    segments: &[SegmentHeads],
) -> Vec<Vec<SegmentOrder>> {
    // Segments of the same heads share the reads of the keys.
    let mut by_heads: Vec<(usize, &SegmentHeads)> = segments.iter().enumerate().collect();
    by_heads.sort_by_key(|(_, segment)| (segment.batch, segment.heads.start, segment.heads.end));
    let same_heads =
        |a: &(usize, &SegmentHeads), b: &(usize, &SegmentHeads)| (a.1.batch, &a.1.heads) == (b.1.batch, &b.1.heads);
    let ranked: Vec<(usize, Vec<SegmentOrder>)> = by_heads
        .par_chunk_by(same_heads)
        .flat_map_iter(|members| {
            let SegmentHeads { batch, heads, .. } = members[0].1;
            let numbers: Vec<usize> = members.iter().map(|(_, segment)| segment.segment).collect();
            let orders = rank_heads(inputs, plan, config, *batch, heads.clone(), &numbers);
            members.iter().map(|(i, _)| *i).zip(orders)
        })
        .collect();
    let mut orders = vec![Vec::new(); segments.len()];
    ranked.into_iter().for_each(|(i, ranked)| orders[i] = ranked);
    orders
}

/// Ranks `segments` (numbers into `plan.segments`) for `heads`, which share one KV head. Returns `orders[s][g]` for the
/// `s`-th segment and the `g`-th head.
fn rank_heads<T: Element>(
    inputs: &Inputs<'_, T>,
    plan: &Plan,
    config: &S2oConfig,
    batch: usize,
    heads: Range<usize>,
    segments: &[usize],
) -> Vec<Vec<SegmentOrder>> {
    let kv_head = inputs.shape.kv_head(heads.start);
    let guide = config.q_perm().then(|| k_guide(inputs, plan.segment_len, (batch, kv_head)));
    segments
        .par_chunks(SEGMENTS_PER_TASK)
        .flat_map_iter(|segments| {
            let members: Vec<Member<'_>> = segments
                .iter()
                .flat_map(|&s| heads.clone().map(move |head| (&plan.segments[s], head)))
                .map(|(segment, head)| Member { segment, head })
                .collect();
            let scored = score_keys(inputs, config, (batch, kv_head), &members);
            let mut orders = scored
                .into_par_iter()
                .zip(&members)
                .map(|(scored, member)| {
                    let q_perm = match &guide {
                        Some(guide) => order_queries(inputs, batch, member, guide),
                        None => Permutation::identity(member.segment.rows.len()),
                    };
                    SegmentOrder { q_perm, kv_perm: order_keys(scored) }
                })
                .collect::<Vec<_>>()
                .into_iter();
            segments.iter().map(|_| orders.by_ref().take(heads.len()).collect()).collect::<Vec<Vec<_>>>()
        })
        .collect()
}

/// One row of scores: one segment for one query head.
struct Member<'a> {
    segment: &'a Segment,
    head: usize,
}

/// For each member the keys before its segment with `k_scores` of Algorithm 1, packed for sorting; the front sink and
/// the recent keys sort first. One product of the coefficients with each tile of keys.
fn score_keys<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    (batch, kv_head): (usize, usize),
    members: &[Member<'_>],
) -> Vec<Vec<u64>> {
    let head_dim = inputs.shape.head_dim();
    let depth = match config.key_score() {
        KeyScore::MeanQuery => head_dim,
        KeyScore::SecondCumulant { .. } => 2 * head_dim,
    };
    let lanes = members.len().next_multiple_of(LANES);
    let mut coefficients = vec![0.0; depth * lanes];
    for (i, member) in members.iter().enumerate() {
        let column = score_coefficients(inputs, config, batch, member);
        for (row, c) in coefficients.chunks_exact_mut(lanes).zip(column) {
            row[i] = c;
        }
    }
    let mut scored: Vec<Vec<u64>> = members.iter().map(|member| Vec::with_capacity(member.segment.start)).collect();
    let mut keys = vec![0.0; ROWS_AT_A_TIME * head_dim];
    let mut features = vec![0.0; ROWS_AT_A_TIME * depth];
    let mut scores = vec![0.0; ROWS_AT_A_TIME * lanes];
    let end = members.iter().map(|member| member.segment.start).max().unwrap_or(0);
    for first in (0..end).step_by(ROWS_AT_A_TIME) {
        let positions = first..(first + ROWS_AT_A_TIME).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), &mut keys);
        // The features are [K | K * K], or only K.
        for (key, features) in keys.chunks_exact(head_dim).zip(features.chunks_exact_mut(depth)) {
            let (plain, squared) = features.split_at_mut(head_dim);
            plain.copy_from_slice(key);
            squared.iter_mut().zip(key).for_each(|(square, k)| *square = k * k);
        }
        microkernel::scores(lanes, depth, &coefficients, &features[..positions.len() * depth], &mut scores);
        for (i, (scored, member)) in scored.iter_mut().zip(members).enumerate() {
            for (t, row) in (first..member.segment.start).zip(scores.chunks_exact(lanes).take(positions.len())) {
                let leads = config.leads(t, member.segment.start) && row[i].is_finite();
                scored.push(sort_key(if leads { f32::MAX } else { row[i] }, t as u32));
            }
        }
    }
    scored
}

/// Coefficients of `[K | K * K]` in the score: `[scale q_mean | c scale^2 var(q)]`, over all of the segment's queries
/// in this call.
fn score_coefficients<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    batch: usize,
    member: &Member<'_>,
) -> Vec<f32> {
    let head_dim = inputs.shape.head_dim();
    let rows = member.segment.all_rows();
    let mut moments = Moments::new(head_dim);
    let mut queries = vec![0.0; ROWS_AT_A_TIME * head_dim];
    for rows in query_tiles(rows, ROWS_AT_A_TIME) {
        let queries = inputs.q.gather((batch, member.head), rows, &mut queries);
        queries.chunks_exact(head_dim).for_each(|query| moments.add(query));
    }
    let (mean, var) = moments.finish();
    let scale = f64::from(inputs.scale.softmax_scale);
    let mean = mean.into_iter().map(|mean| (scale * mean) as f32);
    match config.key_score() {
        KeyScore::MeanQuery => mean.collect(),
        KeyScore::SecondCumulant { c } => {
            let weight = f64::from(c) * scale * scale;
            mean.chain(var.into_iter().map(|var| (weight * var) as f32)).collect()
        }
    }
}

/// `kv_perm`.
fn order_keys(mut keys: Vec<u64>) -> Permutation {
    sort_by_score(&mut keys);
    Permutation::from_sorted(keys.iter().map(|&key| key as u32).collect())
}

/// `k_guide`: the mean of the first segment's keys.
fn k_guide<T: Element>(inputs: &Inputs<'_, T>, segment_len: usize, (batch, kv_head): (usize, usize)) -> Vec<f64> {
    let head_dim = inputs.shape.head_dim();
    let count = segment_len.min(inputs.shape.k_len());
    let mut sum = vec![0.0f64; head_dim];
    let mut key = vec![0.0; head_dim];
    for position in 0..count {
        inputs.k.read(batch, position, kv_head, &mut key);
        sum.iter_mut().zip(&key).for_each(|(sum, &k)| *sum += f64::from(k));
    }
    sum.iter().map(|sum| sum / count as f64).collect()
}

/// `q_perm`: the segment's queries outside the dense tail, by descending `<q, k_guide>`.
fn order_queries<T: Element>(inputs: &Inputs<'_, T>, batch: usize, member: &Member<'_>, guide: &[f64]) -> Permutation {
    let mut query = vec![0.0; guide.len()];
    let scores: Vec<f64> = member
        .segment
        .rows
        .clone()
        .map(|row| {
            inputs.q.read(batch, row, member.head, &mut query);
            query.iter().zip(guide).map(|(&q, k)| f64::from(q) * k).sum()
        })
        .collect();
    Permutation::argsort_desc(&scores)
}
