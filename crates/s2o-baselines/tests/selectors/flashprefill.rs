//! FlashPrefill against its definition, one head at a time in f64.

use candle_core::{Device, Tensor};
use candle_s2o::{BLOCK_Q, PrefillCall};
use proptest::prelude::*;
use s2o_baselines::FlashPrefill;

use crate::inputs::{Inputs, ascending, assert_causal, assert_dense, assert_takes_half_precision, calls};
use crate::plain::{Compared, PlainHead, TIE, dot, mean};

/// The scores of the key blocks for the queries `rows` of a block.
fn scores(head: &PlainHead, block: usize, rows: std::ops::Range<usize>) -> Vec<f64> {
    let of_block = |key_block: usize| -> f64 {
        let (first, last) = (key_block * BLOCK_Q, key_block * BLOCK_Q + BLOCK_Q - 1);
        let key = mean(&head.k[first..head.k.len().min(last + 1)]);
        let sees_all = rows.clone().filter(|row| head.offset() + row >= last);
        sees_all.map(|row| (head.scale * dot(&head.q[row], &key)).exp()).sum()
    };
    (0..=block).map(of_block).collect()
}

fn compare(inputs: &Inputs, alpha: f64) -> Compared {
    let selection = inputs.select(&FlashPrefill::default().alpha(alpha).unwrap());
    let blocks = inputs.call.prompt_len.div_ceil(BLOCK_Q);
    inputs.compare(&selection, |_, head| {
        let rows = head.query_blocks().map(|(block, rows)| {
            let scores = scores(head, block, rows);
            let greatest = scores.iter().copied().fold(0.0, f64::max);
            let decide = |(key_block, &score): (usize, &f64)| match () {
                () if key_block < 2 || block - key_block < 4 || block + 2 >= blocks => Some(true),
                () if score >= alpha * greatest * (1.0 + TIE) && score > 0.0 => Some(true),
                () if score <= alpha * greatest * (1.0 - TIE) => Some(false),
                () => None,
            };
            scores.iter().enumerate().map(decide).collect()
        });
        rows.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn chooses_as_defined(call in calls(), alpha in 0.001..0.99f64, later in 0..600usize) {
        // The prompt may go on after the call.
        let prompt_len = call.call.prompt_len + later;
        let call = Inputs { call: PrefillCall { prompt_len, ..call.call }, ..call };
        compare(&call, alpha).assert_decided(5, 200);
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(&call, FlashPrefill::default().alpha(0.0).unwrap());
    }

    #[test]
    fn later_keys_do_not_matter(call in calls()) {
        assert_causal(&call, &FlashPrefill::default());
    }

    #[test]
    fn half_precision(call in calls()) {
        assert_takes_half_precision(&call, FlashPrefill::default());
    }
}

#[test]
fn the_last_query_of_a_whole_block_scores_its_own_keys() {
    // The last queries of blocks 6 and 7 agree only with the keys of their own block. Block 7 lacks its last key.
    const LEN: usize = 7 * BLOCK_Q + 100;
    let tensor = |entry: &dyn Fn(usize) -> [f32; 2]| {
        let rows = (0..LEN).flat_map(|row| entry(row).into_iter().chain([0.0; 6]));
        Tensor::from_vec(rows.collect(), (1, LEN, 1, 8), &Device::Cpu).unwrap()
    };
    let q = tensor(&|row| [row == 7 * BLOCK_Q - 1, row == LEN - 1].map(|is_last| if is_last { 200.0 } else { 0.0 }));
    let k = tensor(&|row| [6, 7].map(|block| if row / BLOCK_Q == block { 1.0 } else { 0.0 }));
    let inputs = Inputs::new([q, k.clone(), k]);
    // The prompt goes on, so its last blocks are not among these.
    let inputs = Inputs { call: PrefillCall { prompt_len: 2 * LEN, ..inputs.call }, ..inputs };
    let selection = inputs.select(&FlashPrefill::default());
    assert_eq!(ascending(&selection, 6), [0, 1, 3, 4, 5, 6]);
    assert_eq!(ascending(&selection, 7), [0, 1, 2, 3, 4, 5, 6, 7]);
}
