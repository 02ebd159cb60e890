//! Delta Attention against its definition, query by query in f64.

use candle_s2o::{Attention, PrefillCall};
use proptest::prelude::*;
use s2o_baselines::{BlockSparse, SlidingWindow};

use crate::inputs::{Inputs, calls, head};

fn window() -> BlockSparse<SlidingWindow> {
    BlockSparse::new(SlidingWindow::new(150, 1).unwrap())
}

/// Checks output and work of a call whose prompt goes on for `later` tokens.
fn assert_corrected(inputs: &Inputs, stride: usize, later: usize) {
    let prompt_len = inputs.call.prompt_len + later;
    let call = PrefillCall { prompt_len, ..inputs.call };
    let [q, k, v] = &inputs.tensors;
    let method = window().with_delta(stride).unwrap();
    let got = method.prefill(&call, q, k, v).unwrap();
    let plain = window();
    let sparse = plain.prefill(&call, q, k, v).unwrap();
    let offset = inputs.shape.q_offset();
    let exact_rows = 128.max(stride) + prompt_len % stride;
    let is_exact = |position: usize| position + exact_rows >= prompt_len;
    for number in 0..inputs.num_heads() {
        let plain = inputs.head(number);
        let (batch, q_head) = (number / inputs.shape.num_heads(), number % inputs.shape.num_heads());
        let values = head(v, batch, inputs.shape.kv_head(q_head));
        let [got, sparse] = [&got, &sparse].map(|out| head(out, batch, q_head));
        let exact = |row: usize| -> Vec<f64> {
            let weights = plain.attention(row);
            (0..16).map(|d| weights.iter().zip(&values).map(|(w, v)| w * v[d]).sum()).collect()
        };
        // All rows would take long in f64.
        for row in (0..got.len()).filter(|row| row % 37 == 0 || row + 1 == got.len()) {
            let first = ((offset + row) / stride * stride).max(offset) - offset;
            let (of_row, of_first) = (exact(row), exact(first));
            for d in 0..16 {
                let corrected = sparse[row][d] + of_first[d] - sparse[first][d];
                let expected = if is_exact(offset + row) { of_row[d] } else { corrected };
                assert!((got[row][d] - expected).abs() < 2e-5, "head {number}, row {row} of {}", got.len());
            }
        }
    }
    // One score counts as much as in a tile.
    let firsts = (0..inputs.shape.q_len())
        .map(|row| offset + row)
        .filter(|&position| is_exact(position) || position == offset || position % stride == 0);
    let tiles = firsts.map(|position| position + 1).sum::<usize>() as f64 / (128.0 * 128.0);
    let (with, without) = (method.take_work(), plain.take_work());
    for (with, without) in with[&0].iter().zip(&without[&0]) {
        assert!((with.visited - without.visited - tiles).abs() < 1e-9);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn corrects_as_defined(inputs in calls(), stride in 1..200usize, later in 0..400usize) {
        assert_corrected(&inputs, stride, later);
    }
}

#[test]
fn a_chunk_may_begin_where_the_exact_rows_begin() {
    // The last 128 + 300 % 7 rows are exact. Row 166 would be the sixth of a run.
    assert_corrected(&Inputs::random([1, 134, 2, 16], [300, 1], 1), 7, 0);
}

#[test]
fn a_stride_of_zero_is_refused() {
    let message = window().with_delta(0).unwrap_err().to_string();
    assert_eq!(message, "delta: stride: expected at least 1 query, got 0");
}
