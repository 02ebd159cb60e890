//! Algorithm 1: the GPU's orders against exact scores, and attention with these orders.

use candle_core::DType;
use candle_s2o::{
    KeyScore, Permutation, ProbeStride, Ranking, S2oConfig, S2oConfigBuilder, S2oOp, SegmentLen, StopRule,
};
use rayon::prelude::*;
use s2o_core::reference::{self, Head};
use s2o_core::{Plan, Segment};

use crate::Runner;
use crate::exact::bits;
use crate::problem::{Memory, Problem, Sizes};
use crate::sparse::{check_output, expected_visits, op};

fn config(change: impl FnOnce(S2oConfigBuilder) -> S2oConfigBuilder) -> S2oConfig {
    let builder = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_below(0).tau(0.1);
    change(builder).build().unwrap()
}

fn rank(problem: &Problem, config: &S2oConfig, prompt_len: usize) -> Ranking {
    let [q, k, _] = &problem.on_gpu;
    S2oOp::new(problem.scale, config.clone()).with_prompt_len(prompt_len).rank(q, k).unwrap()
}

/// Non-finite scores come first and then the `lead`, ascending keys, both in natural order. Every other score in the first
/// `sorted_len` places lies within `error` and 1/4096 of the range, the resolution of the sort, of the score that belongs in
/// its place, and no later score is above the best that belongs there. Equal scores keep their natural order.
fn check_descending(perm: &Permutation, scores: &[f64], lead: &[u32], error: f64, sorted_len: usize) {
    let (finite, mut first): (Vec<u32>, Vec<u32>) =
        (0..perm.len() as u32).partition(|&i| scores[i as usize].is_finite());
    let (lead, mut sorted): (Vec<u32>, Vec<u32>) = finite.into_iter().partition(|i| lead.binary_search(i).is_ok());
    first.extend(lead);
    let (got_first, got) = perm.as_slice().split_at(first.len());
    assert_eq!(got_first, first, "non-finite scores, the front sink and the recent keys come first");
    let score = |i: u32| scores[i as usize];
    sorted.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let range = sorted.first().map_or(0.0, |&first| score(first) - score(sorted[sorted.len() - 1]));
    if range == 0.0 {
        assert_eq!(got, sorted, "equal scores in another order");
    }
    let allowed = error + range / 4096.0;
    let (in_order, rest) = got.split_at(sorted_len.saturating_sub(first.len()).min(got.len()));
    for (place, (&got, &want)) in in_order.iter().zip(&sorted).enumerate() {
        let away = (score(got) - score(want)).abs();
        assert!(away <= allowed, "place {place}: a score {away} from {}, allowed {allowed}", score(want));
    }
    // The best score that belongs after the sorted places.
    if let Some(&best) = sorted.get(in_order.len()) {
        for &got in rest {
            assert!(score(got) <= score(best) + allowed, "after the sorted keys: {} above {}", score(got), score(best));
        }
    }
}

/// Three times the largest error that the kernel's 16-bit products make in the scores of the keys before a segment.
fn score_error(problem: &Problem, (batch, head): (usize, usize), segment: &Segment, config: &S2oConfig) -> f64 {
    let shape = &problem.shape;
    let d = shape.head_dim();
    let q = |row: usize| &problem.host[0][((batch * shape.q_len() + row) * shape.num_heads() + head) * d..][..d];
    let kv_head = shape.kv_head(head);
    let k = |t: usize| &problem.host[1][((batch * shape.k_len() + t) * shape.num_kv_heads() + kv_head) * d..][..d];
    let rows: Vec<&[f32]> = segment.all_rows().map(q).filter(|q| q.iter().all(|x| x.is_finite())).collect();
    let scale = f64::from(problem.scale);
    // Of the mean, in the type of the keys.
    let rounding = if problem.dtype == DType::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 };
    let c = match config.key_score() {
        KeyScore::MeanQuery => 0.0,
        KeyScore::SecondCumulant { c } => f64::from(c),
    };
    // For each dimension, the factors of k and of its square in the score.
    let factors = |i: usize| {
        let column = || rows.iter().map(|q| f64::from(q[i]));
        let mean = column().sum::<f64>() / rows.len().max(1) as f64;
        let variance = column().map(|x| (x - mean).powi(2)).sum::<f64>() / rows.len().max(1) as f64;
        (scale * mean, c * scale * scale * variance)
    };
    let factors: Vec<(f64, f64)> = (0..d).map(factors).collect();
    let error = |key: &[f32]| {
        let (mut linear, mut second, mut size) = (0.0f64, 0.0f64, 0.0f64);
        for ((mean, variance), &k) in factors.iter().zip(key) {
            let (a, b) = (mean * f64::from(k), variance * f64::from(k).powi(2));
            linear += a * a;
            second += b * b;
            size += a.abs() + b;
        }
        second.sqrt() / 256.0 + linear.sqrt() * rounding + size / 1_048_576.0
    };
    3.0 * (0..segment.start).map(|t| error(k(t))).filter(|error| error.is_finite()).fold(0.0, f64::max)
}

fn check_ranking(problem: &Problem, config: &S2oConfig, prompt_len: usize, ranking: &Ranking) {
    let shape = &problem.shape;
    let plan = Plan::new(config, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    plan.check_ranking(shape, ranking).unwrap();
    let qkv = problem.host.each_ref().map(Vec::as_slice);
    ranking.par_iter().enumerate().for_each(|(head, orders)| {
        let at = (head / shape.num_heads(), head % shape.num_heads());
        let head = Head::new(shape, qkv, problem.scale, at.0, at.1);
        for (segment, order) in plan.segments.iter().zip(orders).filter(|(segment, _)| !segment.rows.is_empty()) {
            let sink = config.front_sink().min(segment.start);
            let recent = segment.start.saturating_sub(config.recent()).max(sink);
            let lead: Vec<u32> = (0..sink as u32).chain(recent as u32..segment.start as u32).collect();
            let scores = reference::key_scores(&head, segment, config);
            let complete = prompt_len <= 98_304 || config.stop_rule() == StopRule::SumRatio;
            let sorted_len = if complete { segment.start } else { 39_936 };
            let error = score_error(problem, at, segment, config);
            check_descending(&order.kv_perm, &scores, &lead, error, sorted_len);
            if config.q_perm() {
                let scores = reference::query_scores(&head, segment, plan.segment_len);
                check_descending(&order.q_perm, &scores, &[], 0.0, scores.len());
            } else {
                assert_eq!(order.q_perm, Permutation::identity(segment.rows.len()));
            }
        }
    });
}

pub fn cases(runner: &mut Runner) {
    let memories = [Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed, Memory::DimFirst, Memory::Unaligned];
    // (queries, keys, prompt): whole prompts, chunks that begin and end inside segments, few queries.
    let lengths = [(257, 257, 257), (1500, 1500, 1500), (1000, 3333, 5000), (700, 4000, 4000), (5000, 5000, 5000)];
    for (i, (q_len, k_len, prompt_len)) in lengths.into_iter().enumerate() {
        for (j, heads) in [[4, 4], [8, 2], [8, 1]].into_iter().enumerate() {
            let dtype = if (i + j) % 2 == 0 { DType::BF16 } else { DType::F16 };
            let head_dim = [128, 64, 256][(i + 2 * j) % 3];
            let memory = memories[(i + j) % memories.len()];
            let key_score = if (i + 2 * j) % 3 == 0 { KeyScore::MeanQuery } else { KeyScore::default() };
            let front_sink = [4, 0, 300][(i + j) % 3];
            let segment = [256, 384, 1024][(i + 2 * j) % 3];
            let recent = [0, 60, 300][(i + 2 * j) % 3];
            let q_perm = j == 1;
            let name = format!(
                "ranking {q_len} of {k_len} {heads:?} D{head_dim} {dtype:?} {memory:?} S{segment} \
                 {key_score:?} sink {front_sink} recent {recent}"
            );
            runner.case(&name, |runner| {
                let config = config(|builder| {
                    let builder = builder.segment_len(SegmentLen::Fixed(segment)).key_score(key_score);
                    builder.front_sink(front_sink).recent(recent).q_perm(q_perm).dense_tail(100)
                });
                let sizes = Sizes { batch: 1 + j, heads, q_len, k_len, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, 4.0);
                let ranking = rank(&problem, &config, prompt_len);
                check_ranking(&problem, &config, prompt_len, &ranking);
                assert!(ranking == rank(&problem, &config, prompt_len), "two runs differ");
                end_to_end(runner, &problem, &config, prompt_len, &ranking);
            });
        }
    }
    runner.case("ranking in groups that fit the workspace", |runner| {
        // Small groups have several blocks a row. The second prompt has partial orders.
        for (q_len, k_len, prompt_len, segment, cap) in
            [(4000, 6000, 6000, 256, 400 << 10), (40_000, 180_000, 1 << 20, 2048, 5 << 20)]
        {
            let sizes = Sizes { batch: 1, heads: [4, 2], q_len, k_len, head_dim: 128 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
            let roomy = config(|builder| builder.segment_len(SegmentLen::Fixed(segment)).q_perm(q_len == 4000));
            let tight = roomy.to_builder().workspace_cap(cap).build().unwrap();
            let [roomy, tight] = [roomy, tight].map(|config| rank(&problem, &config, prompt_len));
            assert!(roomy == tight, "groups change the orders");
        }
    });
    // A dense prompt, and a chunk within the dense tail.
    for (q_len, k_len, dense_below) in [(2000, 2000, 10_000), (100, 3000, 0)] {
        runner.case(&format!("ranking {q_len} of {k_len}, which need none"), |runner| {
            let config = config(|builder| builder.dense_below(dense_below).dense_tail(128));
            let sizes = Sizes { batch: 1, heads: [4, 2], q_len, k_len, head_dim: 128 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
            let is_natural = |order: &Permutation| *order == Permutation::identity(order.len());
            let ranking = rank(&problem, &config, k_len);
            assert_eq!(ranking.len(), 4);
            assert!(ranking.iter().flatten().all(|order| is_natural(&order.kv_perm)), "not the natural orders");
        });
    }
    values(runner);
    // Sorts by one block and by several for a row, with one and two blocks on a multiprocessor, in rows longer than a window,
    // and partial orders of rows that are shorter than what is sorted, little longer, and much longer.
    for (q_len, k_len, prompt_len, rule, head_dim) in [
        (50_000, 50_000, 50_000, StopRule::Auto, 128),
        (3000, 60_000, 60_000, StopRule::Auto, 128),
        (3000, 60_000, 1 << 20, StopRule::Auto, 128),
        (3000, 140_000, 1 << 20, StopRule::Auto, 128),
        (3000, 98_304, 98_304, StopRule::Auto, 128),
        (3000, 131_072, 131_072, StopRule::Auto, 128),
        (3000, 131_072, 131_072, StopRule::Auto, 256),
        (3000, 1 << 20, 1 << 20, StopRule::Auto, 128),
        (3000, 1 << 20, 1 << 20, StopRule::SumRatio, 128),
    ] {
        runner.case(&format!("ranking of the last {q_len} of {k_len} in {prompt_len} {rule} D{head_dim}"), |runner| {
            let config = S2oConfig::builder().probe_stride(ProbeStride::Off).stop_rule(rule).build().unwrap();
            let sizes = Sizes { batch: 1, heads: [4, 2], q_len, k_len, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
            let ranking = rank(&problem, &config, prompt_len);
            check_ranking(&problem, &config, prompt_len, &ranking);
            end_to_end(runner, &problem, &config, prompt_len, &ranking);
        });
    }
}

/// Queries and keys that are not just noise.
fn values(runner: &mut Runner) {
    type Change = fn(usize, f32) -> f32;
    // Of an element's index within the tokens of one head (head_dim 128), and its value.
    let same: Change = |_, x| x;
    let kinds: [(&str, Change, Change); 7] = [
        ("an offset", same, |i, x| x + if i % 128 == 5 { 60.0 } else { 4.0 }),
        ("tiny", |_, x| x * 1e-4, |_, x| x * 1e-4),
        ("huge", |_, x| x * 50.0, |_, x| x * 200.0),
        ("skewed", same, |i, x| match i / 128 {
            token if token % 100 == 0 => x * 30.0,
            token if token % 7 == 0 => x * 0.05,
            _ => x,
        }),
        ("constant", same, |i, _| (i % 128) as f32 / 64.0 - 1.0),
        ("of two values", same, |i, _| ((i % 128 * if i / 128 % 3 == 0 { 37 } else { 11 }) % 128) as f32 / 64.0 - 1.0),
        ("not finite", not_finite, not_finite),
    ];
    // (queries, keys, segment)
    for (q_len, k_len, segment) in [(2048, 2048, 256), (1000, 3333, 512), (1500, 70_000, 2048)] {
        for (kind, q, k) in kinds {
            for (dtype, key_score) in [(DType::BF16, KeyScore::default()), (DType::F16, KeyScore::MeanQuery)] {
                runner.case(&format!("ranking {q_len} of {k_len} values {kind} {dtype:?}"), |runner| {
                    let config = config(|builder| {
                        builder.segment_len(SegmentLen::Fixed(segment)).key_score(key_score).q_perm(q_len == 1000)
                    });
                    let sizes = Sizes { batch: 1, heads: [2, 1], q_len, k_len, head_dim: 128 };
                    let mut problem = Problem::new(&runner.device, sizes, dtype, Memory::Contiguous, 4.0);
                    problem.replace(0, q);
                    problem.replace(1, k);
                    let ranking = rank(&problem, &config, k_len);
                    check_ranking(&problem, &config, k_len, &ranking);
                    assert!(ranking == rank(&problem, &config, k_len), "two runs differ");
                });
            }
        }
    }
}

/// Every 97th token has a NaN, is negative infinity throughout, or has infinities.
fn not_finite(i: usize, x: f32) -> f32 {
    match (i / 128 % 97, i / 128 % 5, i % 3) {
        (7, 0 | 1, 0) => f32::NAN,
        (7, 2, _) => f32::NEG_INFINITY,
        (7, 3 | 4, 0) => f32::INFINITY,
        _ => x,
    }
}

/// One call gives the same result as ranking followed by attention, and skips as much as the CPU path.
fn end_to_end(runner: &Runner, problem: &Problem, config: &S2oConfig, prompt_len: usize, ranking: &Ranking) {
    let op_without = || S2oOp::new(problem.scale, config.clone()).with_prompt_len(prompt_len);
    let [q, k, v] = &problem.on_gpu;
    problem.poison();
    let (whole, stats) = op_without().apply_with_stats(q, k, v).unwrap();
    let (staged, staged_stats) = op(problem, config, prompt_len, ranking).apply_with_stats(q, k, v).unwrap();
    assert!(bits(&whole) == bits(&staged), "one call differs from two");
    assert_eq!(stats, staged_stats);
    check_output(problem, config, prompt_len, ranking, &stats, &whole);
    let [q, k, v] = &problem.on_cpu;
    let (_, mut on_cpu) = op_without().apply_with_stats(q, k, v).unwrap();
    for tile in on_cpu.heads.iter_mut().flat_map(|head| &mut head.tiles) {
        tile.visited = expected_visits(runner, problem, config, tile);
    }
    let (got, want) = (stats.density(), on_cpu.density());
    assert!((got - want).abs() < 0.02, "density {got:.3}, expected {want:.3}");
}
