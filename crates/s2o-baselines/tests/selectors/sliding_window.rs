//! Tests of the sliding window and sink, and of the code that all selectors share.

use candle_core::{Device, Tensor};
use candle_s2o::{Attention, BLOCK_Q, PrefillCall};
use proptest::prelude::*;
use s2o_baselines::{BlockSparse, SlidingWindow};

use crate::inputs::{assert_dense, calls, greatest_difference};

/// Any window, or one that reaches exactly one key into a block.
fn windows() -> impl Strategy<Value = usize> {
    prop_oneof![1..1500usize, (0..12usize).prop_map(|blocks| blocks * BLOCK_Q + 1)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn blocks_of_window_and_sink(call in calls(), window in windows(), sink in 0..400usize) {
        let selection = call.select(&SlidingWindow::new(window, sink).unwrap());
        call.compare(&selection, |_, head| {
            let rows = head.query_blocks().map(|(block, _)| {
                let mut plain = vec![Some(false); block + 1];
                // Position by position: the keys that any query of the whole block sees.
                for position in block * BLOCK_Q..(block + 1) * BLOCK_Q {
                    let keys = (position.saturating_sub(window - 1)..=position).chain(0..sink.min(position + 1));
                    keys.for_each(|key| plain[key / BLOCK_Q] = Some(true));
                }
                plain
            });
            rows.collect()
        });
    }

    #[test]
    fn a_window_over_everything_is_dense(call in calls()) {
        assert_dense(&call, SlidingWindow::new(call.shape.k_len(), 0).unwrap());
    }
}

#[test]
fn chunks_add_up_and_prompts_begin_anew() {
    let x = Tensor::rand(-1f32, 1.0, (1, 1000, 1, 16), &Device::Cpu).unwrap();
    let method = BlockSparse::new(SlidingWindow::new(200, 0).unwrap());
    let prefill = |start: usize, end: usize| {
        let (q, kv) = (x.narrow(1, start, end - start).unwrap(), x.narrow(1, 0, end).unwrap());
        let call = PrefillCall { layer: 2, softmax_scale: 0.25, prompt_len: 1000 };
        method.prefill(&call, &q, &kv, &kv).unwrap()
    };
    let whole = prefill(0, 1000);
    let whole_work = method.take_work();
    let parts = [(0, 384), (384, 700), (700, 1000)].map(|(start, end)| prefill(start, end));
    assert!(greatest_difference(&Tensor::cat(&parts, 1).unwrap(), &whole) < 1e-5);
    // The chunks cut the query block 640..768, so it counts in both.
    let parts_work = method.take_work();
    assert_eq!(parts_work[&2][0].visited, whole_work[&2][0].visited + 3.0);
    prefill(0, 1000);
    prefill(0, 1000);
    assert_eq!(method.take_work(), whole_work);
}

#[test]
fn prompts_below_a_length_are_dense() {
    let method = BlockSparse::new(SlidingWindow::new(128, 0).unwrap()).dense_below(500);
    assert_eq!(method.name(), "sliding-window");
    // The first chunk of a prompt: the length of the whole prompt decides.
    let x = Tensor::rand(-1f32, 1.0, (1, 400, 1, 16), &Device::Cpu).unwrap();
    for (prompt_len, is_dense) in [(499, true), (500, false), (501, false)] {
        method.prefill(&PrefillCall { layer: 0, softmax_scale: 0.25, prompt_len }, &x, &x, &x).unwrap();
        let density = method.take_work()[&0][0].density();
        assert_eq!(density == 1.0, is_dense, "{prompt_len}: {density}");
    }
}
