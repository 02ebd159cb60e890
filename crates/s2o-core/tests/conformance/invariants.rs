//! Properties that must hold for every input, independent of the reference.

use proptest::prelude::*;
use s2o_core::cpu::{self, Inputs, Strided};
use s2o_core::reference;
use s2o_core::{AttnShape, AttnStats, Mask, Permutation, Ranking, S2oConfig, S2oError, SegmentLen};
use s2o_testkit::{noise, relative_l2};

use crate::random::{Case, attention, cases, dense, inputs, tensors};

/// Every order reversed.
fn reversed(mut ranking: Ranking) -> Ranking {
    for order in ranking.iter_mut().flatten() {
        let turn = |perm: &Permutation| Permutation::new(perm.as_slice().iter().rev().copied().collect()).unwrap();
        order.kv_perm = turn(&order.kv_perm);
        order.q_perm = turn(&order.q_perm);
    }
    ranking
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn never_stopping_is_dense_in_any_order(case in cases()) {
        let case = case.with(|config| config.tau(0.0));
        let want = dense(&case.inputs(), Mask::Causal);
        let (out, stats) = case.attention(None);
        prop_assert!(relative_l2(&out, &want) <= 2e-6);
        prop_assert_eq!(stats.density(), 1.0);
        let ranking = reversed(cpu::rank(&case.inputs(), &case.config, case.prompt_len).unwrap());
        let (out, _) = case.attention(Some(&ranking));
        prop_assert!(relative_l2(&out, &want) <= 2e-6);
    }

    #[test]
    fn a_larger_tau_never_visits_more(case in cases(), factor in 1.0..4.0f32) {
        let ranking = cpu::rank(&case.inputs(), &case.config, case.prompt_len).unwrap();
        let larger = case.with(|config| config.tau((case.tau() * factor).min(0.99)));
        // With one order, the gains of a tile up to its stop do not depend on tau.
        let [(_, few), (_, many)] = [larger, case].map(|case| case.attention(Some(&ranking)));
        for (few, many) in few.heads.iter().zip(&many.heads) {
            for (few, many) in few.tiles.iter().zip(&many.tiles) {
                prop_assert!(few.visited <= many.visited);
            }
        }
        prop_assert!((0.0..=1.0).contains(&few.density()) && few.density() <= many.density());
    }

    #[test]
    fn results_do_not_depend_on_the_threads_or_the_workspace(case in cases()) {
        let (out, stats) = case.attention(None);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        prop_assert_eq!(pool.install(|| case.attention(None)), (out.clone(), stats.clone()));
        let smallest = 20 * case.shape.group_size() * case.shape.k_len();
        prop_assert_eq!(case.with(|config| config.workspace_cap(smallest)).attention(None), (out, stats));
    }

    #[test]
    fn layouts_do_not_matter(case in cases(), apart in 1..=2usize) {
        let shape = case.shape;
        // (batch, heads, length, head_dim), with gaps between the elements and after each row.
        let gap = 3;
        let transpose = |data: &[f32], len: usize, heads: usize| {
            let (d, width) = (shape.head_dim(), shape.head_dim() * apart + gap);
            let mut moved = vec![f32::NAN; shape.batch() * heads * len * width];
            for (i, row) in data.chunks_exact(d).enumerate() {
                let (b, s, h) = (i / heads / len, i / heads % len, i % heads);
                let moved = moved[((b * heads + h) * len + s) * width..].iter_mut().step_by(apart);
                moved.zip(row).for_each(|(moved, x)| *moved = *x);
            }
            let strides = [heads * len * width, width, len * width, apart];
            (moved, [shape.batch(), len, heads, d], strides)
        };
        let (q, q_dims, q_strides) = transpose(&case.q, shape.q_len(), shape.num_heads());
        let (k, k_dims, k_strides) = transpose(&case.k, shape.k_len(), shape.num_kv_heads());
        let (v, ..) = transpose(&case.v, shape.k_len(), shape.num_kv_heads());
        let strided = Inputs::new(
            Strided::new("q", &q, q_dims, q_strides).unwrap(),
            Strided::new("k", &k, k_dims, k_strides).unwrap(),
            Strided::new("v", &v, k_dims, k_strides).unwrap(),
            case.scale(),
        ).unwrap();
        let moved = attention(&strided, &case.config, case.prompt_len, None).unwrap();
        prop_assert_eq!(moved, case.attention(None));
    }

    #[test]
    fn the_dense_tail_sees_every_key(case in cases()) {
        let case = Case { prompt_len: case.shape.k_len(), ..case }.with(|config| config.tau(0.9));
        let (out, _) = case.attention(None);
        let want = dense(&case.inputs(), Mask::Causal);
        let row = case.shape.num_heads() * case.shape.head_dim();
        let tail = case.config.dense_tail().resolve(case.prompt_len).min(case.shape.q_len()) * row;
        for b in 1..=case.shape.batch() {
            let end = b * case.shape.q_len() * row;
            if tail > 0 {
                prop_assert!(relative_l2(&out[end - tail..end], &want[end - tail..end]) <= 2e-6);
            }
        }
    }
}

#[test]
fn whole_segments_in_chunks_equal_the_whole() {
    let whole = AttnShape::new([1, 512, 2, 64], [512, 1]).unwrap();
    let [q, k, v] = tensors(&whole, 7, 4.0);
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(128)).dense_below(0).build().unwrap();
    let (want, want_stats) = attention(&inputs(&whole, &q, &k, &v), &config, 512, None).unwrap();
    let mut got = Vec::new();
    let mut stats = AttnStats::default();
    for (begin, end) in [(0, 128), (128, 384), (384, 512)] {
        let shape = AttnShape::new([1, end - begin, 2, 64], [end, 1]).unwrap();
        let part = inputs(&shape, &q[begin * 128..end * 128], &k[..end * 64], &v[..end * 64]);
        let (out, of_part) = attention(&part, &config, 512, None).unwrap();
        stats.append(of_part);
        got.extend(out);
    }
    assert_eq!(got, want);
    assert_eq!(stats.density(), want_stats.density());
}

#[test]
fn short_prompts_take_the_dense_path() {
    let shape = AttnShape::new([1, 700, 2, 64], [700, 2]).unwrap();
    let [q, k, v] = tensors(&shape, 3, 4.0);
    let inputs = inputs(&shape, &q, &k, &v);
    let config = S2oConfig::builder().tau(0.9).dense_below(701).build().unwrap();
    let (out, stats) = attention(&inputs, &config, 700, None).unwrap();
    assert_eq!(out, dense(&inputs, Mask::Causal));
    assert_eq!(stats.density(), 1.0);
    // The reference reads no ranking there either.
    for ranking in [None, Some(&Ranking::new())] {
        let scale = shape.default_softmax_scale();
        let (want, stats) = reference::attention(&shape, [&q, &k, &v], scale, &config, 700, ranking).unwrap();
        assert!(relative_l2(&out, &want) < 2e-6);
        assert_eq!(stats.density(), 1.0);
    }
    // The length of the prompt counts, not that of the chunk.
    assert!(attention(&inputs, &config, 701, None).unwrap().1.density() < 1.0);
}

#[test]
fn a_million_keys() {
    // Few queries at the end of a long cache: positions beyond 2^20, a ranked prefix of a million keys.
    let k_len = (1 << 20) + 77;
    let shape = AttnShape::new([1, 300, 1, 8], [k_len, 1]).unwrap();
    let [q, k, v] = tensors(&shape, 11, 2.0);
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_tail(1).tau(0.0).build().unwrap();
    let inputs = inputs(&shape, &q, &k, &v);
    let (out, stats) = attention(&inputs, &config, k_len, None).unwrap();
    assert!(relative_l2(&out, &dense(&inputs, Mask::Causal)) < 1e-5);
    assert_eq!(stats.density(), 1.0);
}

#[test]
fn nan_and_infinity_neither_hang_nor_hide() {
    let shape = AttnShape::new([1, 400, 1, 16], [400, 1]).unwrap();
    let config = S2oConfig::builder()
        .segment_len(SegmentLen::Fixed(128))
        .tile_q(32)
        .tile_k(16)
        .dense_below(0)
        .dense_tail(0)
        .tau(0.5);
    let nan_rows = |out: &[f32]| (0..400).filter(|row| out[row * 16].is_nan()).collect::<Vec<usize>>();
    for q_perm in [false, true] {
        let config = config.clone().q_perm(q_perm).build().unwrap();
        for poison in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let [q, mut k, v] = tensors(&shape, 1, 4.0);
            k[20 * 16..21 * 16].fill(poison);
            let poisoned = inputs(&shape, &q, &k, &v);
            let (out, _) = attention(&poisoned, &config, 400, None).unwrap();
            assert_eq!(nan_rows(&out), (20..400).collect::<Vec<_>>(), "{poison} key");
            assert_eq!(
                nan_rows(&out),
                nan_rows(&dense(&poisoned, Mask::Causal)),
                "{poison} key: as in dense attention"
            );

            let [mut q, k, v] = tensors(&shape, 1, 4.0);
            q[200 * 16] = poison;
            let (out, stats) = attention(&inputs(&shape, &q, &k, &v), &config, 400, None).unwrap();
            assert_eq!(nan_rows(&out), [200], "{poison} query poisons its own output only");
            let segment: Vec<_> = stats.heads[0].tiles.iter().filter(|tile| tile.segment == 1).collect();
            assert!(segment.iter().any(|tile| tile.visited == tile.prefix_tiles), "the poisoned tile sees every key");
            assert!(segment.iter().any(|tile| tile.visited < tile.prefix_tiles), "its neighbours stop as before");

            let [q, k, mut v] = tensors(&shape, 1, 4.0);
            v[150 * 16..151 * 16].fill(poison);
            let (out, _) = attention(&inputs(&shape, &q, &k, &v), &config, 400, None).unwrap();
            let poisoned = (0..400).filter(|row| !out[row * 16].is_finite()).collect::<Vec<usize>>();
            assert!((150..256).all(|row| poisoned.contains(&row)), "{poison} value: the window shows it");
            assert!(poisoned[0] >= 128, "{poison} value: not before its query tile");
        }
    }
}

#[test]
fn a_cap_below_one_segment_is_refused() {
    let shape = AttnShape::new([1, 512, 4, 8], [512, 2]).unwrap();
    let (q, kv) = (noise(512 * 32, 1), noise(512 * 16, 2));
    let inputs = inputs(&shape, &q, &kv, &kv);
    let run = |cap: usize| {
        let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(128)).dense_below(0).dense_tail(0);
        attention(&inputs, &config.workspace_cap(cap).build().unwrap(), 512, None)
    };
    // One head of the last segment; the two heads of a group are ranked separately if necessary.
    let one_head = 20 * 384;
    let error = run(one_head - 1).unwrap_err();
    assert_eq!(error, S2oError::WorkspaceTooSmall { expected: 7680, got: 7679, prefix_len: 384 });
    let error = S2oError::WorkspaceTooSmall { expected: 76_800, got: 1 << 15, prefix_len: 384 }.to_string();
    assert_eq!(
        error,
        "--workspace-mib (S2O_WORKSPACE_MIB): expected at least 0.074 for one segment of 384 keys, got 0.03125"
    );
    assert_eq!(run(one_head).unwrap(), run(1 << 20).unwrap());
}

#[test]
fn queries_in_the_dense_tail_alone_need_no_ranking() {
    // As if a prompt ended a few tokens after a long cache: not even one order would fit.
    let shape = AttnShape::new([1, 100, 2, 8], [3000, 1]).unwrap();
    let [q, k, v] = tensors(&shape, 2, 3.0);
    let config = S2oConfig::builder().workspace_cap(1).build().unwrap();
    let inputs = inputs(&shape, &q, &k, &v);
    assert_eq!(attention(&inputs, &config, 3000, None).unwrap().0, dense(&inputs, Mask::Causal));
}

#[test]
fn the_dense_tail_reaches_into_the_chunk_before() {
    // The last chunk is shorter than the tail, so the tail begins in the chunk before.
    let whole = AttnShape::new([1, 3001, 1, 16], [3001, 1]).unwrap();
    let [q, k, v] = tensors(&whole, 9, 6.0);
    let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).tau(0.9).build().unwrap();
    let want = dense(&inputs(&whole, &q, &k, &v), Mask::Causal);
    let mut got = Vec::new();
    for (begin, end) in [(0, 1500), (1500, 3000), (3000, 3001)] {
        let shape = AttnShape::new([1, end - begin, 1, 16], [end, 1]).unwrap();
        let part = inputs(&shape, &q[begin * 16..end * 16], &k[..end * 16], &v[..end * 16]);
        got.extend(attention(&part, &config, 3001, None).unwrap().0);
    }
    let tail = (3001 - 128) * 16;
    assert!(relative_l2(&got[tail..], &want[tail..]) < 2e-6);
    assert!(relative_l2(&got[..tail], &want[..tail]) > 1e-3, "the rest is sparse");
}

#[test]
fn misfits_are_refused() {
    let shape = AttnShape::new([1, 256, 1, 8], [256, 1]).unwrap();
    let data = noise(256 * 8, 1);
    let inputs = inputs(&shape, &data, &data, &data);
    let config = S2oConfig::builder().dense_below(0).build().unwrap();
    let short = attention(&inputs, &config, 255, None).unwrap_err();
    assert_eq!(short, S2oError::PromptShorterThanKeys { k_len: 256, got: 255 });
    let refused = |ranking: &Ranking| attention(&inputs, &config, 256, Some(ranking)).unwrap_err();
    assert!(matches!(refused(&vec![]), S2oError::Ranking(_)));
    let mut ranking = cpu::rank(&inputs, &config, 256).unwrap();
    ranking[0][0].q_perm = Permutation::identity(5);
    assert!(matches!(refused(&ranking), S2oError::Ranking(_)));
}
