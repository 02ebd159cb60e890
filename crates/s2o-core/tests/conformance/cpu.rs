//! The fast CPU path, stage by stage. Each stage gets the reference's results of the previous stage.

use half::{bf16, f16};
use proptest::prelude::*;
use s2o_core::cpu::{self, Element};
use s2o_core::reference::{self, Head};
use s2o_core::{Permutation, Plan, Ranking, S2oConfig, SegmentOrder};
use s2o_testkit::relative_l2;

use crate::random::{Case, attention, cases, inputs};
use crate::vectors::load_all;

fn reference_ranking(case: &Case) -> Ranking {
    let plan = Plan::new(&case.config, &case.shape, case.prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    heads(case).map(|head| reference::rank_all(&head, &plan, &case.config)).collect()
}

fn heads(case: &Case) -> impl Iterator<Item = Head> {
    (0..case.shape.batch() * case.shape.num_heads()).map(|i| {
        let (b, h) = (i / case.shape.num_heads(), i % case.shape.num_heads());
        Head::new(&case.shape, case.qkv(), case.scale(), b, h)
    })
}

fn vector_cases() -> impl Iterator<Item = (String, Case)> {
    load_all().into_iter().flat_map(|vectors| {
        let case = |run| {
            let [q, k, v] = vectors.qkv().map(<[f32]>::to_vec);
            let (shape, config, prompt_len) = (vectors.shape, vectors.config(run), vectors.prompt_len());
            Case { shape, config, prompt_len, softcap: None, q, k, v }
        };
        let runs = vectors.runs().iter().map(|run| (format!("{} run {}", vectors.name, run.index), case(run)));
        runs.collect::<Vec<_>>()
    })
}

/// Checks that permutations are valid and that their f64 scores descend within f32 rounding of the largest score.
fn check_ranking(case: &Case) {
    let plan = Plan::new(&case.config, &case.shape, case.prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    let ranking = cpu::rank(&case.inputs(), &case.config, case.prompt_len).unwrap();
    for (head, orders) in heads(case).zip(&ranking) {
        for (segment, order) in plan.segments.iter().zip(orders) {
            order.check(segment).unwrap();
            let sink = case.config.front_sink().min(segment.start);
            let recent = segment.start.saturating_sub(case.config.recent()).max(sink)..segment.start;
            let lead: Vec<u32> = (0..sink).chain(recent).map(|t| t as u32).collect();
            let kv_perm = order.kv_perm.as_slice();
            assert_eq!(kv_perm[..lead.len()], lead, "the front sink and the recent keys lead");
            let scores = reference::key_scores(&head, segment, &case.config);
            check_descending(&order.kv_perm, &scores, lead.len());
            if case.config.q_perm() {
                let scores = reference::query_scores(&head, segment, plan.segment_len);
                check_descending(&order.q_perm, &scores, 0);
            } else {
                assert_eq!(order.q_perm, Permutation::identity(segment.rows.len()));
            }
        }
    }
}

fn check_descending(perm: &Permutation, scores: &[f64], from: usize) {
    Permutation::new(perm.as_slice().to_vec()).expect("a permutation");
    let tolerance = 2e-6 * scores.iter().fold(1.0f64, |max, s| max.max(s.abs()));
    for pair in perm.as_slice()[from.min(perm.len())..].windows(2) {
        let (a, b) = (scores[pair[0] as usize], scores[pair[1] as usize]);
        assert!(a >= b - tolerance, "{a} before {b}");
        assert!(a != b || pair[0] < pair[1], "equal scores keep the lower index first");
    }
}

/// (relative error, density difference, query tiles that stopped at another tile) against the reference.
fn against_reference(case: &Case, ranking: Option<&Ranking>) -> (f64, f64, usize) {
    let (want, want_stats) =
        reference::attention(&case.shape, case.qkv(), case.scale(), &case.config, case.prompt_len, ranking).unwrap();
    let (out, stats) = case.attention(ranking);
    assert_eq!(stats.tiles_causal(), want_stats.tiles_causal());
    assert_eq!(stats.heads.len(), want_stats.heads.len());
    let mut moved = 0;
    for (got, want) in stats.heads.iter().zip(&want_stats.heads) {
        assert_eq!(got.tiles.len(), want.tiles.len());
        for (got, want) in got.tiles.iter().zip(&want.tiles) {
            let place = |t: &s2o_core::TileStats| (t.segment, t.dense_tail, t.rows, t.window_tiles, t.prefix_tiles);
            assert_eq!(place(got), place(want));
            moved += usize::from(got.visited != want.visited);
        }
    }
    (relative_l2(&out, &want), (stats.density() - want_stats.density()).abs(), moved)
}

/// Whether any gain is so near its threshold that f32 may decide otherwise.
fn near_tie(case: &Case, ranking: &Ranking) -> bool {
    let visits = |factor: f32| {
        let nudged = case.with(|config| config.tau(case.tau() * factor));
        let (_, stats) =
            reference::attention(&case.shape, case.qkv(), case.scale(), &nudged.config, case.prompt_len, Some(ranking))
                .unwrap();
        stats.heads.iter().flat_map(|head| head.tiles.iter().map(|t| t.visited)).collect::<Vec<_>>()
    };
    visits(1.0 - 1e-4) != visits(1.0 + 1e-4)
}

#[test]
fn vectors_rankings() {
    for (_, case) in vector_cases() {
        check_ranking(&case);
    }
}

#[test]
fn vectors_with_injected_rankings() {
    let backwards = |order: &Permutation| Permutation::new(order.as_slice().iter().rev().copied().collect()).unwrap();
    for (name, case) in vector_cases() {
        let ranking = reference_ranking(&case);
        // An order that no ranking gives.
        let reversed = ranking.iter().map(|orders| {
            let reversed = orders
                .iter()
                .map(|order| SegmentOrder { q_perm: backwards(&order.q_perm), kv_perm: backwards(&order.kv_perm) });
            reversed.collect()
        });
        let reversed = reversed.collect();
        for ranking in [ranking, reversed] {
            let (error, _, moved) = against_reference(&case, Some(&ranking));
            assert_eq!(moved, 0, "{name}: query tiles that stopped elsewhere");
            assert!(error <= 2e-6, "{name}: output differs by {error:e}");
        }
    }
}

#[test]
fn vectors_end_to_end() {
    for (name, case) in vector_cases() {
        let (error, density, _) = against_reference(&case, None);
        assert!(error <= 1e-4, "{name}: output differs by {error:e}");
        assert!(density <= 0.01, "{name}: density differs by {density}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rankings_descend(case in cases()) {
        check_ranking(&case);
    }

    #[test]
    fn outputs_with_injected_rankings(case in cases()) {
        let ranking = reference_ranking(&case);
        let (error, _, moved) = against_reference(&case, Some(&ranking));
        if moved > 0 {
            prop_assert!(near_tie(&case, &ranking), "{} query tiles stopped elsewhere without a near-tie", moved);
        } else {
            prop_assert!(error <= 2e-6, "output differs by {:e}", error);
        }
    }

    #[test]
    fn end_to_end(case in cases()) {
        let (error, density, moved) = against_reference(&case, None);
        // A near-tie in the ranking or at the threshold may rarely move a tile, and with it the output.
        prop_assume!(moved == 0);
        prop_assert!(error <= 1e-4, "output differs by {:e}", error);
        prop_assert!(density <= 0.01);
    }

    #[test]
    fn end_to_end_without_stopping(case in cases()) {
        // Near-ties in the ranking cannot matter when every tile is visited.
        let case = case.with(|config| config.tau(0.0));
        let (error, density, moved) = against_reference(&case, None);
        prop_assert!(error <= 2e-6, "output differs by {:e}", error);
        prop_assert_eq!((density, moved), (0.0, 0));
    }

    #[test]
    fn half_inputs_equal_the_widened_ones(case in cases()) {
        check_half::<bf16>(&case, 1.0 / 256.0)?;
        check_half::<f16>(&case, 1.0 / 2048.0)?;
    }
}

/// Half inputs give the results of their f32 copies, up to the rounding of the output.
fn check_half<T: Element>(case: &Case, rounding: f32) -> Result<(), TestCaseError> {
    let narrow = |wide: &[f32]| {
        let mut half = vec![T::default(); wide.len()];
        T::narrow(wide, &mut half);
        half
    };
    let widen = |half: &[T]| {
        let mut wide = vec![0.0; half.len()];
        T::widen(half, &mut wide);
        wide
    };
    let (q, k, v) = (narrow(&case.q), narrow(&case.k), narrow(&case.v));
    let mut half_out = narrow(&vec![f32::NAN; case.q.len()]);
    let half_inputs = inputs(&case.shape, &q, &k, &v);
    let half_stats = cpu::attention(&half_inputs, &case.config, case.prompt_len, &mut half_out).unwrap();
    let (q, k, v) = (widen(&q), widen(&k), widen(&v));
    let (out, stats) = attention(&inputs(&case.shape, &q, &k, &v), &case.config, case.prompt_len, None).unwrap();
    prop_assert_eq!(half_stats, stats);
    for (half, wide) in widen(&half_out).iter().zip(&out) {
        prop_assert!((half - wide).abs() <= rounding * wide.abs() + 1e-7, "{} {}", half, wide);
    }
    Ok(())
}
