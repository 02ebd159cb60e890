//! The block-sparse executor against attention to the selected keys, one query at a time in f64.

use proptest::prelude::*;
use s2o_core::{
    AttnShape, BLOCK_Q, BlockError, BlockLists, BlockSelection, Mask, S2oError, SoftmaxState, cpu, query_blocks,
};
use s2o_testkit::{noise, relative_l2};

use crate::random::{dense, inputs, tensors};

/// One call; its numbers determine the selection.
#[derive(Debug, Clone)]
struct Case {
    shape: AttnShape,
    mask: Mask,
    selection: BlockSelection,
    seed: u64,
}

prop_compose! {
    fn cases()(
        batch in 1..=2usize,
        kv_heads in 1..=2usize,
        group in prop_oneof![Just(1usize), Just(3)],
        head_dim in prop_oneof![Just(16usize), Just(64)],
        k_len in 1..900usize,
        before in prop_oneof![1 => Just(0.0), 3 => 0.0..1.0f64],
        mask in prop_oneof![3 => Just(Mask::Causal), 1 => Just(Mask::Full)],
        block_k in prop_oneof![2 => Just(128usize), 1 => Just(64), 1 => Just(32)],
        every in 1..5usize,
        column_step in prop_oneof![1 => Just(0usize), 1 => 1..60usize],
        value_threshold in prop_oneof![2 => Just(None), 1 => (-6.0..-0.5f32).prop_map(Some)],
        seed in any::<u32>(),
    ) -> Case {
        let q_len = k_len - ((k_len - 1) as f64 * before) as usize;
        let shape = AttnShape::new([batch, q_len, kv_heads * group, head_dim], [k_len, kv_heads]).unwrap();
        let heads = shape.batch() * shape.num_heads();
        let cut: Vec<_> = query_blocks(&shape, mask).collect();
        let lists = (0..heads * cut.len()).map(|list| {
            let block = (shape.q_offset() + cut[list % cut.len()].start) / BLOCK_Q;
            let end = if mask.is_causal() { ((block + 1) * BLOCK_Q).min(k_len) } else { k_len };
            // Some lists are empty, some lack the diagonal.
            let mix = list * 7 + seed as usize;
            (0..end.div_ceil(block_k)).filter(move |key_block| (mix + key_block * 5).is_multiple_of(every))
        });
        let blocks = BlockLists::new(lists).with_block_k(block_k).unwrap();
        let columns = (column_step > 0 && mask.is_causal())
            .then(|| (0..heads).map(|head| (head as u32 % 3..k_len as u32).step_by(column_step).collect()).collect());
        Case { shape, mask, selection: BlockSelection { blocks, columns, value_threshold }, seed: u64::from(seed) }
    }
}

/// The keys of a query block in the order of the executor, tile by tile, and whether they are hidden from earlier rows.
fn key_tiles(case: &Case, head: usize, list: usize, rows: &std::ops::Range<usize>) -> Vec<Vec<usize>> {
    let offset = case.shape.q_offset();
    let (blocks, block_k) = (&case.selection.blocks, case.selection.blocks.block_k());
    let selected = |key: usize| blocks.list(list).contains(&((key / block_k) as i32));
    let columns = case.selection.columns.as_ref().map_or(&[][..], |columns| &columns[head]);
    let columns: Vec<usize> = columns.iter().map(|&key| key as usize).collect();
    let columns: Vec<usize> = columns.into_iter().filter(|&key| key < offset + rows.start && !selected(key)).collect();
    let mut tiles: Vec<Vec<usize>> = columns.chunks(BLOCK_Q).map(<[usize]>::to_vec).collect();
    for block in blocks.list(list).iter().rev().map(|&block| block as usize) {
        tiles.push((block * block_k..((block + 1) * block_k).min(case.shape.k_len())).collect());
    }
    tiles
}

/// Output and skipped tiles, and whether a score is so near to the threshold that rounding decides.
fn expected(case: &Case, [q, k, v]: [&[f32]; 3]) -> (Vec<f64>, Vec<f64>, bool) {
    let shape = &case.shape;
    let (dim, offset) = (shape.head_dim(), shape.q_offset());
    let scale = f64::from(shape.default_softmax_scale());
    let cut: Vec<_> = query_blocks(shape, case.mask).collect();
    let mut out = vec![0.0; shape.batch() * shape.q_len() * shape.num_heads() * dim];
    let (mut skipped, mut is_close) = (vec![0.0; shape.batch() * shape.num_heads()], false);
    for (head, skipped) in skipped.iter_mut().enumerate() {
        let (b, h) = (head / shape.num_heads(), head % shape.num_heads());
        let kv = |data: &[f32], key: usize, d: usize| {
            f64::from(data[((b * shape.k_len() + key) * shape.num_kv_heads() + shape.kv_head(h)) * dim + d])
        };
        for (i, rows) in cut.iter().enumerate() {
            let tiles = key_tiles(case, head, head * cut.len() + i, rows);
            let sees = |row: usize, key: usize| !case.mask.is_causal() || key <= offset + row;
            let seeing: Vec<usize> =
                rows.clone().filter(|&row| tiles.iter().flatten().any(|&key| sees(row, key))).collect();
            let mut states = vec![SoftmaxState::empty(dim); seeing.len()];
            for tile in &tiles {
                let scores: Vec<Vec<f64>> = seeing
                    .iter()
                    .map(|&row| {
                        let query = &q[((b * shape.q_len() + row) * shape.num_heads() + h) * dim..][..dim];
                        let score = |&key: &usize| {
                            let dot: f64 = (0..dim).map(|d| f64::from(query[d]) * kv(k, key, d)).sum();
                            if sees(row, key) { dot * scale } else { f64::NEG_INFINITY }
                        };
                        tile.iter().map(score).collect()
                    })
                    .collect();
                let values = |t: &usize| (0..dim).map(|d| kv(v, *t, d)).collect::<Vec<f64>>();
                let (values, nothing) = (tile.iter().map(values).collect::<Vec<_>>(), vec![0.0; dim]);
                let seen = tile.iter().filter(|&&key| seeing.last().is_some_and(|&row| sees(row, key))).count();
                for (strip, group) in states.chunks_mut(32).enumerate() {
                    let scores = &scores[strip * 32..][..group.len()];
                    let relative = |(scores, state): (&Vec<f64>, &SoftmaxState)| {
                        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        max - state.row_max.max(max)
                    };
                    let largest = scores.iter().zip(&*group).map(relative).fold(f64::NEG_INFINITY, f64::max);
                    let above =
                        case.selection.value_threshold.map_or(f64::INFINITY, |least| largest - f64::from(least));
                    let skips = above < 0.0;
                    is_close |= above.abs() < 1e-3;
                    if skips {
                        *skipped += (group.len() * seen) as f64 / (BLOCK_Q * BLOCK_Q) as f64;
                    }
                    for (state, scores) in group.iter_mut().zip(scores) {
                        state.update(scores, |i| if skips { &nothing } else { &values[i] });
                    }
                }
            }
            for (&row, state) in seeing.iter().zip(&states) {
                let row = ((b * shape.q_len() + row) * shape.num_heads() + h) * dim;
                out[row..row + dim].copy_from_slice(&state.finish());
            }
        }
    }
    (out, skipped, is_close)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn queries_attend_to_what_is_selected(case in cases()) {
        let [q, k, v] = tensors(&case.shape, case.seed, 3.0);
        let mut out = vec![f32::NAN; q.len()];
        let inputs = inputs(&case.shape, &q, &k, &v);
        let skipped = cpu::block_sparse(&inputs, case.mask, &case.selection, &mut out).unwrap();
        let (want, want_skipped, is_close) = expected(&case, [&q, &k, &v]);
        let largest = want.iter().fold(1e-3f64, |max, x| max.max(x.abs()));
        let error = out.iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).abs()).fold(0.0, f64::max);
        let same_skips = skipped.iter().zip(&want_skipped).all(|(got, want)| (got - want).abs() < 1e-9);
        prop_assert!(same_skips || is_close);
        prop_assert!(out.iter().all(|x| x.is_finite()));
        prop_assert!(error < 2e-5 * largest || !same_skips, "error {error:e} of {largest}");
    }

    #[test]
    fn everything_selected_is_dense(case in cases()) {
        let [q, k, v] = tensors(&case.shape, case.seed, 3.0);
        let shape = &case.shape;
        let cut: Vec<_> = query_blocks(shape, case.mask).collect();
        let lists = (0..shape.batch() * shape.num_heads() * cut.len()).map(|list| {
            let block = (shape.q_offset() + cut[list % cut.len()].start) / BLOCK_Q;
            0..if case.mask.is_causal() { block + 1 } else { shape.k_len().div_ceil(BLOCK_Q) }
        });
        let all = BlockSelection::from(BlockLists::new(lists));
        let inputs = inputs(shape, &q, &k, &v);
        let mut out = vec![f32::NAN; q.len()];
        cpu::block_sparse(&inputs, case.mask, &all, &mut out).unwrap();
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1e-2);
        prop_assert!(out.iter().zip(&dense(&inputs, case.mask)).all(is_close));
        if case.mask.is_causal() {
            prop_assert!(all.work(shape).iter().all(|head| head.density() == 1.0));
        }
    }
}

#[test]
fn values_far_below_the_maximum_are_skipped_for_32_queries_together() {
    // Queries score 0 with the first key block and -10 with the second. The rows `zeros` score 0 with both.
    let shape = AttnShape::new([2, 200, 2, 16], [200, 1]).unwrap();
    let zeros: [&[usize]; 4] = [&[170], &[195], &[], &[130, 170, 195]];
    let mut q = vec![1.0; 2 * 200 * 2 * 16];
    for (i, query) in q.chunks_exact_mut(16).enumerate() {
        let (sequence, row, head) = (i / 400, i / 2 % 200, i % 2);
        if zeros[sequence * 2 + head].contains(&row) {
            query.fill(0.0);
        }
    }
    let mut k = vec![0.0; 2 * 200 * 16];
    k.chunks_exact_mut(200 * 16).for_each(|keys| keys[128 * 16..].fill(-2.5));
    let v = noise(k.len(), 1);
    let lists = (0..8).map(|list| 0..=list % 2);
    for threshold in [-5.0, 0.0] {
        let selection = BlockSelection { value_threshold: Some(threshold), ..BlockLists::new(lists.clone()).into() };
        let case = Case { shape, mask: Mask::Causal, selection, seed: 0 };
        let (want, ..) = expected(&case, [&q, &k, &v]);
        let mut out = vec![f32::NAN; q.len()];
        let skipped = cpu::block_sparse(&inputs(&shape, &q, &k, &v), Mask::Causal, &case.selection, &mut out).unwrap();
        // Of the rows from 128 to 200, cut at 160 and 192, with the 72 keys of the second block.
        assert_eq!(skipped, [32 + 8, 64, 72, 0].map(|rows| f64::from(rows * 72) / (128.0 * 128.0)));
        assert!(relative_l2(&out, &want.iter().map(|&x| x as f32).collect::<Vec<_>>()) < 1e-6);
    }
}

#[test]
fn a_selection_that_does_not_fit_is_refused() {
    let shape = AttnShape::new([1, 256, 1, 16], [256, 1]).unwrap();
    let [q, k, v] = tensors(&shape, 1, 1.0);
    let selection = BlockSelection::from(BlockLists::new([[0], [2]]));
    let error = cpu::block_sparse(&inputs(&shape, &q, &k, &v), Mask::Causal, &selection, &mut vec![0.0; q.len()]);
    assert_eq!(error, Err(S2oError::Blocks(BlockError::KeyBlock { list: 1, below: 2, got: 2 })));
}
