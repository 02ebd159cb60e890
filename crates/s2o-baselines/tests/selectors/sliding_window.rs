//! Tests of the sliding window and sink, and of the code that all selectors share.

use candle_core::{Device, Tensor};
use candle_s2o::{Attention, BLOCK_Q, Mask, PrefillCall, dense_attn, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, BlockSparse, SlidingWindow};

use crate::plain::{ascending, calls, lists};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn blocks_of_window_and_sink(call in calls(), window in 1..1500usize, sink in 0..400usize) {
        let [q, k, v] = call.tensors();
        let selection = SlidingWindow::new(window, sink).unwrap().select(&call.prefill(), &q, &k, &v).unwrap();
        let shape = &call.shape;
        let cut: Vec<_> = query_blocks(shape, Mask::Causal).collect();
        for list in 0..shape.batch() * shape.num_heads() * cut.len() {
            let first = (shape.q_offset() + cut[list % cut.len()].start) / BLOCK_Q * BLOCK_Q;
            // Position by position: the keys that any query of the whole block sees.
            let mut seen: Vec<usize> = (first..first + BLOCK_Q)
                .flat_map(|position| (position.saturating_sub(window - 1)..=position).chain(0..sink.min(position + 1)))
                .map(|key| key / BLOCK_Q)
                .filter(|&block| block * BLOCK_Q < shape.k_len())
                .collect();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(ascending(&selection, list), seen);
        }
        prop_assert_eq!(lists(&selection).check(shape, Mask::Causal), Ok(()));
    }

    #[test]
    fn a_window_over_everything_is_dense(call in calls()) {
        let [q, k, v] = call.tensors();
        let method = BlockSparse::new(SlidingWindow::new(call.shape.k_len(), 0).unwrap());
        let out = method.prefill(&call.prefill(), &q, &k, &v).unwrap();
        let dense = dense_attn(&q, &k, &v, call.prefill().softmax_scale, Mask::Causal).unwrap();
        let error = (out - dense).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        prop_assert!(error.to_scalar::<f32>().unwrap() < 1e-4);
        prop_assert!(method.take_work()[&0].iter().all(|head| head.density() == 1.0));
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
    let error =
        (Tensor::cat(&parts, 1).unwrap() - whole).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    assert!(error.to_scalar::<f32>().unwrap() < 1e-5);
    // The chunks cut the query block 640..768, so it counts in both.
    let parts_work = method.take_work();
    assert_eq!(parts_work[&2][0].visited, whole_work[&2][0].visited + 3.0);
    prefill(0, 1000);
    prefill(0, 1000);
    assert_eq!(method.take_work(), whole_work);
}

#[test]
fn a_window_of_nothing_is_refused() {
    let error = SlidingWindow::new(0, 64).unwrap_err();
    assert_eq!(error.to_string(), "sliding-window: window: expected at least 1 token, got 0");
}
