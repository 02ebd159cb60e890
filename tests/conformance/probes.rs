//! Exact probe queries in the reference: what they correct, what they leave, and what they measure.

use proptest::prelude::*;
use s2o_core::reference::{self, Attended, Measured, Probes, TailMass};
use s2o_core::{AttnShape, Mask, S2oConfig, SegmentLen};
use s2o_testkit::{noise, relative_l2};

use crate::random::{Case, cases, dense, tensors};

const BOTH: [TailMass; 2] = [TailMass::LastGain, TailMass::GeometricMean];

fn probed(case: &Case, stride: usize, tail_mass: TailMass) -> Attended {
    let probes = Some(&Probes { stride, tail_mass });
    let (shape, config) = (&case.shape, &case.config);
    reference::attention_with_probes(shape, case.qkv(), case.scale(), config, case.prompt_len, None, probes).unwrap()
}

fn sparse(case: &Case) -> Vec<f64> {
    reference::attention(&case.shape, case.qkv(), case.scale(), &case.config, case.prompt_len, None).unwrap().0
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

/// A call of one sequence with one KV head, whole prompt, without a dense tail.
fn case(heads: usize, len: usize, head_dim: usize, segment: usize, tau: f32, qkv: [Vec<f32>; 3]) -> Case {
    let shape = AttnShape::new([1, len, heads, head_dim], [len, 1]).unwrap();
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(segment)).tau(tau).dense_tail(0).dense_below(0);
    let config = config.tile_q(32).tile_k(32).build().unwrap();
    let [q, k, v] = qkv;
    Case { shape, config, prompt_len: len, q, k, v }
}

/// Sum over all heads and segments.
fn total(measured: &[Vec<Measured>]) -> Measured {
    measured.iter().flatten().fold(Measured::default(), |sum, one| Measured {
        probes: sum.probes + one.probes,
        norm: sum.norm + one.norm,
        uncorrected: sum.uncorrected + one.uncorrected,
        corrected: sum.corrected + one.corrected,
        skipped_mass: sum.skipped_mass + one.skipped_mass,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nothing_skipped_is_nothing_corrected(case in cases(), stride in 1..80usize) {
        let case = case.with(|config| config.tau(0.0));
        for tail_mass in BOTH {
            let Attended { out, measured, .. } = probed(&case, stride, tail_mass);
            prop_assert!(relative_l2(&narrow(&out), &narrow(&sparse(&case))) < 1e-6);
            let total = total(&measured);
            prop_assert!(total.corrected <= 1e-20 * total.norm && total.skipped_mass == 0.0);
        }
    }

    #[test]
    fn a_probe_at_every_position_is_dense(case in cases()) {
        let want = dense(&case.inputs(), Mask::Causal);
        prop_assert!(relative_l2(&narrow(&probed(&case, 1, TailMass::GeometricMean).out), &want) < 2e-6);
    }

    #[test]
    fn nan_reaches_only_queries_that_see_it(case in cases(), stride in 1..40usize, at in 0.0..1.0f64, in_v: bool) {
        let mut case = case;
        let shape = case.shape;
        let position = (at * shape.k_len() as f64) as usize;
        let poisoned = if in_v { &mut case.v } else { &mut case.k };
        poisoned[position * shape.num_kv_heads() * shape.head_dim()] = f32::NAN;
        let out = probed(&case, stride, TailMass::GeometricMean).out;
        let row = shape.num_heads() * shape.head_dim();
        // Query i of the first sequence is at position k_len - q_len + i.
        let before = position.saturating_sub(shape.k_len() - shape.q_len()).min(shape.q_len());
        prop_assert!(out[..before * row].iter().all(|x| x.is_finite()));
        prop_assert!(out[shape.q_len() * row..].iter().all(|x| x.is_finite()), "another sequence");
    }
}

#[test]
fn a_common_tail_is_corrected_exactly() {
    // Uniform attention. The prefix of the second segment has one value, the windows have others.
    let (len, d) = (512, 8);
    let mut v = noise(len * d, 3);
    v[..256 * d]
        .chunks_exact_mut(d)
        .for_each(|value| value.copy_from_slice(&[1.0, -2.0, 3.0, 0.5, 0.0, 4.0, -1.0, 2.0]));
    // One query tile in a segment, so that all queries skip the same keys.
    let mut case = case(1, len, d, 256, 0.3, [noise(len * d, 1), vec![0.0; len * d], v]);
    case.config = case.config.to_builder().tile_q(256).build().unwrap();
    let want = dense(&case.inputs(), Mask::Causal);
    let before = relative_l2(&narrow(&sparse(&case)), &want);
    let by_gain = probed(&case, 32, TailMass::LastGain);
    let geometric = probed(&case, 32, TailMass::GeometricMean);
    assert!(before > 0.05, "{before}");
    assert!(relative_l2(&narrow(&by_gain.out), &want) < 1e-6);
    assert!(relative_l2(&narrow(&geometric.out), &want) < 0.3 * before);
    let [exact, near] = [by_gain, geometric].map(|attended| attended.measured[0][1]);
    assert_eq!(exact.probes, 8);
    assert!(exact.relative_error() < 1e-6 && near.relative_error() > 1e-3);
    assert!((1.5..3.0).contains(&exact.skipped_mass), "a quarter of the mass was skipped: {}", exact.skipped_mass);
}

#[test]
fn nan_in_a_probe_stays_there() {
    let shape = AttnShape::new([1, 512, 1, 16], [512, 1]).unwrap();
    let mut case = case(1, 512, 16, 256, 0.3, tensors(&shape, 2, 1.0));
    let want = probed(&case, 16, TailMass::GeometricMean).out;
    case.v[400 * 16] = f32::NAN;
    let got = probed(&case, 16, TailMass::GeometricMean).out;
    assert!(got[..400 * 16].iter().all(|x| x.is_finite()));
    assert!(got[400 * 16..].iter().step_by(16).all(|x| x.is_nan()));
    // The probes before the NaN still correct.
    let (got, want) = (&got[256 * 16..400 * 16], &want[256 * 16..400 * 16]);
    assert!(relative_l2(&narrow(got), &narrow(want)) < 0.2);
}

#[test]
fn a_probe_does_not_vouch_for_itself() {
    let shape = AttnShape::new([1, 512, 1, 16], [512, 1]).unwrap();
    let case = case(1, 512, 16, 256, 0.3, tensors(&shape, 2, 1.0));
    // One probe in each segment: alone it would predict itself exactly.
    for tail_mass in BOTH {
        let alone = probed(&case, 256, tail_mass).measured[0][1];
        assert_eq!(alone.probes, 1);
        assert!(alone.uncorrected > 0.0 && alone.corrected == alone.uncorrected);
    }
}

#[test]
fn queries_that_saw_every_key_stay() {
    let [q, k, v] = [1, 2, 3].map(|seed| noise(256 * 16, seed));
    // The only other segment has no prefix.
    let case = case(1, 256, 16, 256, 0.3, [q, k, v]);
    let Attended { out, measured, .. } = probed(&case, 16, TailMass::GeometricMean);
    assert!(relative_l2(&narrow(&out), &dense(&case.inputs(), Mask::Causal)) < 1e-6);
    assert_eq!((measured[0].len(), measured[0][0].probes), (1, 16));
    assert!(measured[0][0].relative_error() < 1e-12);
}

#[test]
fn whole_segments_in_chunks_have_the_probes_of_the_whole() {
    let shape = AttnShape::new([1, 512, 2, 16], [512, 1]).unwrap();
    let whole = case(2, 512, 16, 128, 0.1, tensors(&shape, 5, 2.0));
    let want = probed(&whole, 24, TailMass::GeometricMean);
    let (mut out, mut measured) = (Vec::new(), Vec::new());
    for (begin, end) in [(0, 128), (128, 384), (384, 512)] {
        let shape = AttnShape::new([1, end - begin, 2, 16], [end, 1]).unwrap();
        let part = |data: &[f32], from: usize, row: usize| data[from * row..end * row].to_vec();
        let (q, k, v) = (part(&whole.q, begin, 32), part(&whole.k, 0, 16), part(&whole.v, 0, 16));
        let attended = probed(&Case { shape, q, k, v, ..whole.clone() }, 24, TailMass::GeometricMean);
        out.extend(attended.out);
        measured.extend(attended.measured[1].clone());
    }
    assert_eq!(out, want.out);
    assert_eq!(measured, want.measured[1]);
}

#[test]
fn what_is_measured_is_the_error_of_the_others() {
    let (len, d, heads) = (2048, 16, 2);
    let shape = AttnShape::new([1, len, heads, d], [len, 1]).unwrap();
    for (sharpness, stride) in [(0.5, 16), (2.0, 16), (2.0, 32)] {
        let case = case(heads, len, d, 256, 0.1, tensors(&shape, 11, sharpness));
        let exact = dense(&case.inputs(), Mask::Causal);
        let before = relative_l2(&narrow(&sparse(&case)), &exact);
        for tail_mass in BOTH {
            let Attended { out, measured, .. } = probed(&case, stride, tail_mass);
            let measured = total(&measured);
            assert!((measured.probes as f64 / (len * heads / stride) as f64 - 1.0).abs() < 1e-12);
            // The first segment has no prefix and no error; probes are exact.
            let truth = relative_l2(&narrow(&out), &exact) * (1.0 - 1.0 / stride as f64).powf(-0.5);
            let said = measured.relative_error();
            assert!((0.75..1.35).contains(&(said / truth)), "sharpness {sharpness}: {said} for {truth}");
            let uncorrected = (measured.uncorrected / measured.norm).sqrt();
            assert!((0.75..1.35).contains(&(uncorrected / before)), "{uncorrected} for {before}");
            assert!(truth < 0.85 * before, "sharpness {sharpness}, {tail_mass:?}: {truth} after {before}");
        }
    }
}
