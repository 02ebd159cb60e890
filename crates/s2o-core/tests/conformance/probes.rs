//! Exact probe queries, in the reference and in the fast path: what they correct, what they leave, and what they
//! measure.

use proptest::prelude::*;
use s2o_core::{
    AttnShape, AttnStats, HeadStats, Mask, ProbeStats, ProbeStride, S2oConfig, SegmentLen, StopRule, cpu, reference,
};
use s2o_testkit::{noise, relative_l2};

use crate::random::{Case, cases, dense, tensors};

/// The output and the statistics of the reference.
fn of_reference(case: &Case) -> (Vec<f64>, AttnStats) {
    reference::attention(&case.shape, case.qkv(), case.scale(), &case.config, case.prompt_len, None).unwrap()
}

fn probed(case: &Case, stride: usize) -> Case {
    case.with(|config| config.probe_stride(ProbeStride::Every(stride)))
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

/// A call of one sequence with one KV head, whole prompt, without a dense tail.
fn case(heads: usize, len: usize, head_dim: usize, segment: usize, tau: f32, qkv: [Vec<f32>; 3]) -> Case {
    let shape = AttnShape::new([1, len, heads, head_dim], [len, 1]).unwrap();
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(segment)).tau(tau).dense_tail(0).dense_below(0);
    // One rule, so that probes change nothing but what they are for.
    let config = config.tile_q(32).tile_k(32).stop_rule(StopRule::AllRows).build().unwrap();
    let [q, k, v] = qkv;
    Case { shape, config, prompt_len: len, softcap: None, q, k, v }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nothing_skipped_is_nothing_corrected(case in cases(), stride in 1..80usize) {
        let case = case.with(|config| config.tau(0.0));
        let (out, stats) = of_reference(&probed(&case, stride));
        prop_assert_eq!(&out, &of_reference(&case).0);
        let total = stats.probes().unwrap_or_default();
        prop_assert!(total.corrected == 0.0 && total.skipped_mass == 0.0);
        prop_assert_eq!(probed(&case, stride).attention(None).0, case.attention(None).0);
    }

    #[test]
    fn a_probe_at_every_position_is_dense(case in cases()) {
        let want = dense(&case.inputs(), Mask::Causal);
        let case = probed(&case, 1);
        prop_assert!(relative_l2(&narrow(&of_reference(&case).0), &want) < 2e-6);
        prop_assert!(relative_l2(&case.attention(None).0, &want) < 2e-6);
    }

    #[test]
    fn the_fast_path_is_the_reference(
        case in cases(),
        stride in 1..80usize,
        max_error in prop::option::of(0.01..0.5f32),
    ) {
        let case = probed(&case, stride).with(|config| config.max_error(max_error));
        let ranking = cpu::rank(&case.inputs(), &case.config, case.prompt_len).unwrap();
        let (got, stats) = case.attention(Some(&ranking));
        let (want, want_stats) = reference::attention(
            &case.shape, case.qkv(), case.scale(), &case.config, case.prompt_len, Some(&ranking),
        ).unwrap();
        let visits = |stats: &AttnStats| {
            stats.heads.iter().flat_map(|head| &head.tiles).map(|tile| tile.visited).collect::<Vec<_>>()
        };
        // A gain or an error that equals the threshold within rounding may be decided either way.
        prop_assume!(visits(&stats) == visits(&want_stats));
        prop_assert!(relative_l2(&got, &narrow(&want)) < 1e-5, "{}", relative_l2(&got, &narrow(&want)));
        for (got, want) in stats.heads.iter().zip(&want_stats.heads) {
            prop_assert_eq!(got.probes.len(), want.probes.len());
            for (got, want) in got.probes.iter().zip(&want.probes) {
                let counts = |one: &ProbeStats| (one.segment, one.rows, one.probes, one.repeats);
                prop_assert_eq!(counts(got), counts(want));
                prop_assert!((got.tiles - want.tiles).abs() < 1e-9, "{got:?} {want:?}");
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-4 * b + 1e-9 * want.norm;
                prop_assert!(near(got.norm, want.norm) && near(got.uncorrected, want.uncorrected));
                prop_assert!(near(got.corrected, want.corrected), "{got:?} {want:?}");
                let away = (got.mean_skipped_mass() - want.mean_skipped_mass()).abs();
                prop_assert!(away < 1e-5, "{got:?} {want:?}");
            }
        }
    }

    #[test]
    fn nan_reaches_only_queries_that_see_it(case in cases(), stride in 1..40usize, at in 0.0..1.0f64, in_v: bool) {
        let mut case = case;
        let shape = case.shape;
        let position = (at * shape.k_len() as f64) as usize;
        let poisoned = if in_v { &mut case.v } else { &mut case.k };
        poisoned[position * shape.num_kv_heads() * shape.head_dim()] = f32::NAN;
        let case = probed(&case, stride);
        let out = of_reference(&case).0;
        let row = shape.num_heads() * shape.head_dim();
        // Query i of the first sequence is at position k_len - q_len + i.
        let before = position.saturating_sub(shape.k_len() - shape.q_len()).min(shape.q_len());
        prop_assert!(out[..before * row].iter().all(|x| x.is_finite()));
        prop_assert!(out[shape.q_len() * row..].iter().all(|x| x.is_finite()), "another sequence");
    }
}

#[test]
fn a_common_tail_is_corrected() {
    // Uniform attention. The prefix of the second segment has one value, the windows have others.
    let (len, d) = (512, 8);
    let mut v = noise(len * d, 3);
    v[..256 * d]
        .chunks_exact_mut(d)
        .for_each(|value| value.copy_from_slice(&[1.0, -2.0, 3.0, 0.5, 0.0, 4.0, -1.0, 2.0]));
    // One query tile in a segment, so that all queries skip the same keys.
    let case = case(1, len, d, 256, 0.3, [noise(len * d, 1), vec![0.0; len * d], v]).with(|config| config.tile_q(256));
    let want = dense(&case.inputs(), Mask::Causal);
    let before = relative_l2(&case.attention(None).0, &want);
    let case = probed(&case, 32);
    let (out, stats) = case.attention(None);
    assert!(before > 0.05, "{before}");
    assert!(relative_l2(&out, &want) < 0.3 * before);
    let probes = stats.heads[0].probes[1];
    assert_eq!((probes.segment, probes.probes), (1, 8));
    let skipped = probes.mean_skipped_mass();
    assert!((0.18..0.38).contains(&skipped), "a quarter of the mass was skipped: {skipped}");
}

#[test]
fn nan_in_a_probe_stays_there() {
    let shape = AttnShape::new([1, 512, 1, 16], [512, 1]).unwrap();
    let mut case = probed(&case(1, 512, 16, 256, 0.3, tensors(&shape, 2, 1.0)), 16);
    let want = of_reference(&case).0;
    case.v[400 * 16] = f32::NAN;
    let got = of_reference(&case).0;
    assert!(got[..400 * 16].iter().all(|x| x.is_finite()));
    assert!(got[400 * 16..].iter().step_by(16).all(|x| x.is_nan()));
    // The probes before the NaN still correct.
    let (got, want) = (&got[256 * 16..400 * 16], &want[256 * 16..400 * 16]);
    assert!(relative_l2(&narrow(got), &narrow(want)) < 0.2);
}

#[test]
fn a_probe_does_not_vouch_for_itself() {
    let shape = AttnShape::new([1, 512, 1, 16], [512, 1]).unwrap();
    // One probe in each segment: alone it would predict itself exactly.
    let case = probed(&case(1, 512, 16, 256, 0.3, tensors(&shape, 2, 1.0)), 256);
    for stats in [of_reference(&case).1, case.attention(None).1] {
        let alone = stats.heads[0].probes[1];
        assert_eq!(alone.probes, 1);
        assert!(alone.corrected > 0.0, "the other queries keep their error");
    }
    let without = case.with(|config| config.probe_stride(ProbeStride::Off)).attention(None).0;
    let out = case.attention(None).0;
    let changed = out.chunks_exact(16).zip(without.chunks_exact(16)).filter(|(a, b)| a != b).count();
    assert_eq!(changed, 1, "the probe of the second segment");
}

#[test]
fn the_stop_rule_depends_on_probes() {
    let shape = AttnShape::new([1, 1024, 2, 16], [1024, 1]).unwrap();
    let case = case(2, 1024, 16, 128, 0.2, tensors(&shape, 4, 2.0));
    let of = |case: &Case, rule| case.with(|config| config.stop_rule(rule)).attention(None);
    let with = probed(&case, 16);
    assert_eq!(of(&with, StopRule::Auto), of(&with, StopRule::MeanWeight));
    assert_eq!(of(&case, StopRule::Auto), of(&case, StopRule::AllRows));
    // Far fewer tiles: many keys share the mass.
    let [masses, max_weight, mean_weight] =
        [StopRule::AllRows, StopRule::MaxWeight, StopRule::MeanWeight].map(|rule| of(&with, rule).1.density());
    assert!(max_weight.max(mean_weight) < 0.8 * masses, "{max_weight} and {mean_weight} against {masses}");
}

#[test]
fn queries_that_saw_every_key_stay() {
    // The only segment has no prefix.
    let no_prefix = case(1, 256, 16, 256, 0.3, [1, 2, 3].map(|seed| noise(256 * 16, seed)));
    // The prefix of the second segment is one key tile, which adds less than tau.
    let mut k = noise(64 * 16, 2);
    k[..32 * 16].fill(-2.0);
    let one_tile = case(1, 64, 16, 32, 0.3, [vec![1.0; 64 * 16], k, noise(64 * 16, 3)]);
    for (case, counts) in [(no_prefix, vec![16]), (one_tile, vec![2, 2])] {
        let (out, stats) = probed(&case, 16).attention(None);
        assert_eq!(out, case.attention(None).0);
        assert_eq!(stats.density(), 1.0);
        for (probes, count) in stats.heads[0].probes.iter().zip(counts) {
            assert_eq!((probes.probes, probes.relative_error(), probes.tiles), (count, 0.0, 0.0));
        }
    }
}

#[test]
fn whole_segments_in_chunks_have_the_probes_of_the_whole() {
    let shape = AttnShape::new([1, 512, 2, 16], [512, 1]).unwrap();
    let whole = probed(&case(2, 512, 16, 128, 0.1, tensors(&shape, 5, 2.0)), 24);
    let (want, want_stats) = whole.attention(None);
    let (mut out, mut stats) = (Vec::new(), AttnStats::default());
    // The last cut is inside a segment, between two runs.
    for (begin, end) in [(0, 128), (128, 384), (384, 456), (456, 512)] {
        let shape = AttnShape::new([1, end - begin, 2, 16], [end, 1]).unwrap();
        let part = |data: &[f32], from: usize, row: usize| data[from * row..end * row].to_vec();
        let (q, k, v) = (part(&whole.q, begin, 32), part(&whole.k, 0, 16), part(&whole.v, 0, 16));
        let (part_out, part_stats) = Case { shape, q, k, v, ..whole.clone() }.attention(None);
        out.extend(part_out);
        stats.append(part_stats);
    }
    assert_eq!(out[..384 * 32], want[..384 * 32]);
    for (got, want) in stats.heads.iter().zip(&want_stats.heads) {
        assert_eq!(got.probes[..3], want.probes[..3]);
        let counts = |head: &HeadStats| head.probes.iter().map(|one| (one.segment, one.probes)).collect::<Vec<_>>();
        assert_eq!(counts(got), counts(want));
    }
}

#[test]
fn nothing_depends_on_threads_or_workspace() {
    let shape = AttnShape::new([2, 700, 4, 32], [700, 2]).unwrap();
    let [q, k, v] = tensors(&shape, 9, 2.0);
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(128)).tau(0.1).dense_below(0).tile_q(32).tile_k(32);
    let config = config.probe_stride(ProbeStride::Every(16)).build().unwrap();
    let case = Case { shape, config, prompt_len: 700, softcap: None, q, k, v };
    let want = case.attention(None);
    let small = case.with(|config| config.workspace_cap(20 * 700));
    assert_eq!(small.attention(None), want);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| case.attention(None)), want);
    }
}

#[test]
fn what_is_measured_is_the_error() {
    let (len, d, heads) = (2048, 16, 2);
    let shape = AttnShape::new([1, len, heads, d], [len, 1]).unwrap();
    for (sharpness, stride) in [(0.5, 16), (2.0, 16), (2.0, 32)] {
        let [mut truth, mut measured, mut uncorrected, mut before] = [0.0; 4];
        for seed in 11..17 {
            let case = case(heads, len, d, 256, 0.1, tensors(&shape, seed, sharpness));
            let exact = dense(&case.inputs(), Mask::Causal);
            before += relative_l2(&case.attention(None).0, &exact).powi(2);
            let (out, stats) = probed(&case, stride).attention(None);
            let stats = stats.probes().unwrap();
            assert_eq!((stats.rows, stats.probes), (len * heads, len * heads / stride));
            truth += relative_l2(&out, &exact).powi(2);
            measured += stats.relative_error().powi(2);
            uncorrected += stats.uncorrected / stats.norm;
        }
        // A probe is predicted from fewer probes than the other queries are: what is measured is a little too large.
        let ratio = (measured / truth).sqrt();
        assert!((0.9..1.3).contains(&ratio), "sharpness {sharpness}: {ratio} of the true error");
        let ratio = (uncorrected / before).sqrt();
        assert!((0.85..1.18).contains(&ratio), "sharpness {sharpness}: {ratio} of the error before");
        assert!(truth < 0.85 * 0.85 * before, "sharpness {sharpness}: {truth} after {before}");
    }
}
