//! `max_error`: the measured error of every head and segment stays below the bound.

use proptest::prelude::*;
use s2o_core::{AttnShape, AttnStats, Mask, ProbeStats, ProbeStride, S2oConfig, SegmentLen, StopRule};
use s2o_testkit::relative_l2;

use crate::random::{Case, cases, dense, tensors};

fn measured(stats: &AttnStats) -> impl Iterator<Item = &ProbeStats> {
    stats.heads.iter().flat_map(|head| &head.probes)
}

/// A whole prompt of 2048 tokens, two heads, a probe every 16 tokens. A smaller sharpness makes attention more uniform.
fn case(sharpness: f32) -> Case {
    let shape = AttnShape::new([1, 2048, 2, 16], [2048, 1]).unwrap();
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).tau(0.2).dense_tail(0).dense_below(0);
    let config = config.tile_q(32).tile_k(32).probe_stride(ProbeStride::Every(16)).stop_rule(StopRule::AllRows);
    let config = config.build().unwrap();
    let [q, k, v] = tensors(&shape, 11, sharpness);
    Case { shape, config, prompt_len: 2048, softcap: None, q, k, v }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_measured_error_exceeds_the_bound(case in cases(), stride in 1..80usize, max_error in 0.01..0.5f32) {
        let case = case.with(|config| config.probe_stride(ProbeStride::Every(stride)).max_error(max_error));
        let (_, stats) = case.attention(None);
        for one in measured(&stats) {
            prop_assert!(one.relative_error() <= f64::from(max_error), "{one:?}");
        }
    }
}

#[test]
fn nearly_uniform_attention_needs_nearly_all_keys() {
    let free = case(0.5);
    let exact = dense(&free.inputs(), Mask::Causal);
    let (out, stats) = free.attention(None);
    let error = relative_l2(&out, &exact);
    assert!(error > 0.1 && stats.density() < 0.4, "{error} at {}", stats.density());
    let (out, stats) = free.with(|config| config.max_error(0.05)).attention(None);
    assert!(relative_l2(&out, &exact) < 0.05, "{}", relative_l2(&out, &exact));
    assert!(measured(&stats).filter(|one| one.repeats > 0).count() >= 12, "most of 14 segments are computed again");
    assert!(stats.density() > 1.0, "the first pass was in vain, and it counts: {}", stats.density());
}

#[test]
fn only_what_exceeds_the_bound_is_computed_again() {
    let free = case(2.0);
    let (want, want_stats) = free.attention(None);
    let errors: Vec<f64> = measured(&want_stats).map(ProbeStats::relative_error).collect();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    assert_eq!(free.with(|config| config.max_error(worst as f32 * 1.01)).attention(None), (want.clone(), want_stats));

    let bound = worst / 2.0;
    let (got, stats) = free.with(|config| config.max_error(bound as f32)).attention(None);
    let row = 2 * 16;
    for (head, of_head) in stats.heads.iter().enumerate() {
        for (segment, one) in of_head.probes.iter().enumerate() {
            let before = errors[head * 8 + segment];
            assert_eq!(one.repeats > 0, before > bound, "{before}: {one:?}");
            let rows = |out: &[f32]| {
                let rows = out[segment * 256 * row..][..256 * row].chunks_exact(16).skip(head).step_by(2);
                rows.flatten().copied().collect::<Vec<f32>>()
            };
            assert_eq!(rows(&got) == rows(&want), one.repeats == 0);
        }
    }
}

#[test]
fn a_bound_alone_turns_probes_on() {
    let silent = case(2.0).with(|config| config.probe_stride(ProbeStride::Off));
    assert!(silent.attention(None).1.probes().is_none());
    let (_, stats) = silent.with(|config| config.max_error(0.1)).attention(None);
    assert_eq!(stats.probes().map(|all| all.probes), Some(2 * 2048 / 256 * 8));
}

#[test]
fn passes_do_not_depend_on_threads_or_workspace() {
    let case = case(2.0).with(|config| config.max_error(0.05).q_perm(true).dense_tail(50));
    let want = case.attention(None);
    assert!(measured(&want.1).any(|one| one.repeats > 0));
    assert_eq!(case.with(|config| config.workspace_cap(20 * 2048)).attention(None), want);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| case.attention(None)), want);
    }
}
