//! `max_error` on the GPU: what exceeds the bound is computed again, and nothing else.

use candle_core::DType;
use candle_s2o::{ProbeStats, ProbeStride, S2oConfig, SegmentLen};
use s2o_core::{Plan, cpu};

use crate::Runner;
use crate::exact::bits;
use crate::problem::{Memory, Problem, Sizes};
use crate::sparse::op;

/// Returns the largest number of times that a head and segment was computed again.
fn check_bound(problem: &Problem, free: &S2oConfig, bound: f32) -> usize {
    let shape = &problem.shape;
    let prompt_len = shape.k_len();
    let [q, k, v] = &problem.on_gpu;
    let bounded = free.to_builder().max_error(bound).build().unwrap();
    let ranking = cpu::rank(&problem.inputs(), free, prompt_len).unwrap();
    let (without, before) = op(problem, free, prompt_len, &ranking).apply_with_stats(q, k, v).unwrap();
    problem.poison();
    let (out, stats) = op(problem, &bounded, prompt_len, &ranking).apply_with_stats(q, k, v).unwrap();
    let (without, out) = (bits(&without), bits(&out));
    problem.poison();
    let again = op(problem, &bounded, prompt_len, &ranking).apply(q, k, v).unwrap();
    assert!(bits(&again) == out, "statistics or a second run change the output");
    // Six bytes per key and head: one segment at a time.
    let heads = shape.batch() * shape.num_heads();
    let tight = bounded.to_builder().workspace_cap(7 * heads * prompt_len).build().unwrap();
    let (in_groups, of_groups) = op(problem, &tight, prompt_len, &ranking).apply_with_stats(q, k, v).unwrap();
    assert!(bits(&in_groups) == out && of_groups == stats, "groups change the output");

    let plan = Plan::new(&bounded, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    let d = shape.head_dim();
    let mut most = 0;
    for (index, (head, before)) in stats.heads.iter().zip(&before.heads).enumerate() {
        let (batch, h) = (index / shape.num_heads(), index % shape.num_heads());
        for (after, before) in head.probes.iter().zip(&before.probes) {
            assert!(after.relative_error() <= f64::from(bound), "{after:?}");
            assert_eq!(after.repeats > 0, before.relative_error() > f64::from(bound), "{before:?} {after:?}");
            assert_eq!(after.repeats > 0, after.tiles > before.tiles);
            most = most.max(after.repeats);
            let segment = plan.segments.iter().find(|segment| segment.index == after.segment).unwrap();
            let is_same = segment.rows.clone().all(|row| {
                let at = ((batch * shape.q_len() + row) * shape.num_heads() + h) * d;
                out[at..at + d] == without[at..at + d]
            });
            assert_eq!(is_same, after.repeats == 0);
        }
    }
    most
}

pub fn cases(runner: &mut Runner) {
    for (q_perm, head_dim) in [(false, 128), (true, 128), (false, 256)] {
        for (bound, repeats) in [(0.9, 0), (0.3, 1), (0.1, 1), (0.01, 1)] {
            runner.case(&format!("error bound {bound} q_perm {q_perm} D{head_dim}"), |runner| {
                let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_below(0).tau(0.5);
                let config = config.probe_stride(ProbeStride::Every(16)).q_perm(q_perm).dense_tail(70).build().unwrap();
                let sizes = Sizes { batch: 2, heads: [4, 2], q_len: 2200, k_len: 2500, head_dim };
                let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
                assert!(check_bound(&problem, &config, bound) >= repeats, "the case should exceed its bound");
            });
        }
    }
    runner.case("error bound on nearly uniform attention", |runner| {
        let config = S2oConfig::builder().dense_below(0).max_error(0.1).build().unwrap();
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 16384, k_len: 16384, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 1.0);
        let [q, k, v] = &problem.on_gpu;
        let (_, stats) = candle_s2o::s2o_attn_with_stats(q, k, v, problem.scale, &config).unwrap();
        let measured: Vec<&ProbeStats> = stats.heads.iter().flat_map(|head| &head.probes).collect();
        assert!(measured.iter().all(|one| one.relative_error() <= 0.1));
        assert!(measured.iter().filter(|one| one.repeats > 0).count() > measured.len() / 2);
    });
}
