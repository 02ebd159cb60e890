//! FlashPrefill against its definition, one head at a time in f64.

use candle_s2o::{BLOCK_Q, PrefillCall};
use proptest::prelude::*;
use s2o_baselines::FlashPrefill;

use crate::inputs::{Inputs, assert_causal, assert_dense, assert_takes_half_precision, calls};
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
