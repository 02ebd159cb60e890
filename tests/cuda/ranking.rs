//! Algorithm 1: the GPU's orders against exact scores, and attention with these orders.

use candle_core::{DType, Tensor};
use candle_s2o::{KeyScore, Permutation, Ranking, S2oConfig, S2oConfigBuilder, S2oOp, SegmentLen};
use rayon::prelude::*;
use s2o_core::reference::{self, Head};
use s2o_core::{Plan, cpu};

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

/// Scores must not increase along the order, within the resolution of the sort: a fraction of the standard deviation
/// that grows for outliers.
fn check_descending(perm: &Permutation, scores: &[f64], from: usize) {
    let ordered: Vec<f64> = perm.as_slice()[from.min(perm.len())..].iter().map(|&i| scores[i as usize]).collect();
    let mean = ordered.iter().sum::<f64>() / ordered.len().max(1) as f64;
    let deviation = (ordered.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / ordered.len().max(1) as f64).sqrt();
    let mut best_after = f64::NEG_INFINITY;
    for &score in ordered.iter().rev() {
        let u = (score - mean) / deviation.max(1e-30);
        let tolerance = deviation * (0.015 + 1e-3 * (1.0 + u * u).powf(1.5));
        assert!(best_after - score <= tolerance, "{score} before {best_after}, deviation {deviation}, u {u:.1}");
        best_after = best_after.max(score);
    }
}

fn check_ranking(problem: &Problem, config: &S2oConfig, prompt_len: usize, ranking: &Ranking) {
    let shape = &problem.shape;
    let plan = Plan::new(config, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    plan.check_ranking(shape, ranking).unwrap();
    let qkv = problem.host.each_ref().map(Vec::as_slice);
    ranking.par_iter().enumerate().for_each(|(head, orders)| {
        let (batch, h) = (head / shape.num_heads(), head % shape.num_heads());
        let head = Head::new(shape, qkv, problem.scale, batch, h);
        for (segment, order) in plan.segments.iter().zip(orders).filter(|(segment, _)| !segment.rows.is_empty()) {
            let sink = config.front_sink().min(segment.start);
            assert!(order.kv_perm.as_slice()[..sink].iter().copied().eq(0..sink as u32), "the front sink leads");
            check_descending(&order.kv_perm, &reference::key_scores(&head, segment, config), sink);
            if config.q_perm() {
                check_descending(&order.q_perm, &reference::query_scores(&head, segment, plan.segment_len), 0);
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
            let head_dim = if (i + j / 2) % 2 == 0 { 128 } else { 64 };
            let memory = memories[(i + j) % memories.len()];
            let key_score = if (i + 2 * j) % 3 == 0 { KeyScore::MeanQuery } else { KeyScore::default() };
            let front_sink = [4, 0, 300][(i + j) % 3];
            let segment = [256, 384, 1024][(i + 2 * j) % 3];
            let q_perm = j == 1;
            let name = format!(
                "ranking {q_len} of {k_len} {heads:?} D{head_dim} {dtype:?} {memory:?} S{segment} \
                 {key_score:?} sink {front_sink}"
            );
            runner.case(&name, |runner| {
                let config = config(|builder| {
                    let builder = builder.segment_len(SegmentLen::Fixed(segment)).key_score(key_score);
                    builder.front_sink(front_sink).q_perm(q_perm).dense_tail(100)
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
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 4000, k_len: 6000, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        let roomy = config(|builder| builder.q_perm(true));
        let tight = roomy.to_builder().workspace_cap(400 << 10).build().unwrap();
        assert!(rank(&problem, &roomy, 6000) == rank(&problem, &tight, 6000), "groups change the orders");
    });
    runner.case("ranking of non-finite values", not_finite);
    runner.case("ranking of 128K, last chunk", |runner| {
        let config = S2oConfig::default();
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 3000, k_len: 131_072, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        let ranking = rank(&problem, &config, 131_072);
        check_ranking(&problem, &config, 131_072, &ranking);
        end_to_end(runner, &problem, &config, 131_072, &ranking);
    });
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
        tile.visited = expected_visits(runner, config, tile);
    }
    let (got, want) = (stats.density(), on_cpu.density());
    assert!((got - want).abs() < 0.02, "density {got:.3}, expected {want:.3}");
}

fn not_finite(runner: &Runner) {
    let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 2000, k_len: 2000, head_dim: 128 };
    let mut problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
    let row = 2 * 128;
    // Key 700 of the first KV head and key 1100 of the second; query 1500 of the first head.
    problem.host[1][700 * row] = f32::NAN;
    problem.host[1][1100 * row + 128 + 5] = f32::INFINITY;
    problem.host[0][1500 * 4 * 128 + 3] = f32::NAN;
    let tensor = |data: &[f32], heads: usize| {
        let wide = Tensor::from_slice(data, (1, 2000, heads, 128), &candle_core::Device::Cpu).unwrap();
        wide.to_dtype(DType::BF16).unwrap().to_device(&runner.device).unwrap()
    };
    problem.on_gpu[0] = tensor(&problem.host[0], 4);
    problem.on_gpu[1] = tensor(&problem.host[1], 2);
    let config = config(|builder| builder.front_sink(4));
    let got = rank(&problem, &config, 2000);
    let want = cpu::rank(&problem.inputs(), &config, 2000).unwrap();
    let plan = Plan::new(&config, &problem.shape, 2000, S2oConfig::CPU_BREAK_EVEN).unwrap();
    for (head, (got, want)) in got.iter().zip(&want).enumerate() {
        for (segment, (got, want)) in plan.segments.iter().zip(got.iter().zip(want)) {
            let first = |order: &Permutation| order.as_slice().iter().take(5).copied().collect::<Vec<_>>();
            let poisoned = [700, 1100][head / 2];
            if segment.start > poisoned {
                assert_eq!(first(&got.kv_perm), [0, 1, 2, 3, poisoned as u32], "head {head}, {segment:?}");
            }
            // The non-finite query has little influence on its segment's order.
            let same = got.kv_perm.as_slice().iter().zip(want.kv_perm.as_slice()).take(64).filter(|(a, b)| a == b);
            assert!(segment.start == 0 || same.count() > 40, "head {head}, {segment:?}");
        }
    }
}
