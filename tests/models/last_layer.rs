//! The last layer computes only the positions whose output is wanted, if the attention method allows it.

use std::sync::Mutex;

use candle_core::Tensor;
use candle_s2o::{Attention, Dense, PrefillCall, S2o, S2oConfig, SegmentLen};
use s2o_baselines::{BlockSparse, SlidingWindow};
use s2o_models::{Decoder, PrefillOptions};

use crate::fixtures::*;

/// Passes calls on, notes the queries of each layer, and can hide that queries are independent.
#[derive(Debug)]
struct Noted<'a> {
    inner: &'a dyn Attention,
    hides: bool,
    queries: Mutex<[usize; 2]>,
}

impl<'a> Noted<'a> {
    fn new(inner: &'a dyn Attention, hides: bool) -> Self {
        Self { inner, hides, queries: Mutex::default() }
    }
}

impl Attention for Noted<'_> {
    fn name(&self) -> &str {
        "noted"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        self.queries.lock().unwrap()[call.layer] += q.dim(1)?;
        self.inner.prefill(call, q, k, v)
    }

    fn independent_queries(&self, call: &PrefillCall) -> usize {
        if self.hides { 0 } else { self.inner.independent_queries(call) }
    }
}

/// S2O with a dense tail of 8.
fn s2o() -> S2o {
    let config = S2oConfig::builder().tile_q(16).tile_k(8).segment_len(SegmentLen::Fixed(32)).tau(0.3);
    S2o::new(config.dense_tail(8).dense_below(0).build().unwrap())
}

const LEN: usize = 150;

/// Logits of a prefill and of a token after it, and the queries of each layer.
fn run(decoder: &Decoder, batch: usize, chunk: usize, num_logits: usize, noted: &Noted) -> ([Tensor; 2], [usize; 2]) {
    let mut cache = decoder.new_cache(batch, LEN + 1).unwrap();
    let options = PrefillOptions::new().chunk(chunk).num_logits(num_logits);
    let out = decoder.prefill(&tokens(batch, LEN, 288), &mut cache, noted, options).unwrap();
    assert_eq!(cache.len(), LEN);
    let next = decoder.decode(&tokens(batch, 1, 288), &mut cache).unwrap();
    let last = if num_logits == 0 { out.hidden } else { out.logits };
    ([last, next], *noted.queries.lock().unwrap())
}

#[test]
fn wanted_positions_are_those_of_the_whole_layer() {
    for json in [llama_json(), qwen3_json()] {
        let decoder = decoder(&json, 3);
        let s2o = s2o();
        for (method, tail) in [(&Dense as &dyn Attention, LEN), (&s2o, 8)] {
            for (batch, chunk, num_logits) in
                [(1, LEN, 1), (2, LEN, 0), (1, 40, 1), (2, 37, 8), (1, 69, 9), (2, 69, 70), (1, LEN, LEN)]
            {
                let (got, queries) = run(&decoder, batch, chunk, num_logits, &Noted::new(method, false));
                let (want, all) = run(&decoder, batch, chunk, num_logits, &Noted::new(method, true));
                let what = format!("{}, {batch} x {LEN} in chunks of {chunk}, {num_logits} logits", method.name());
                let wanted = num_logits.max(1);
                // More than the tail: all positions of the chunks that hold a wanted one.
                let of_chunks = LEN - (LEN - wanted) / chunk * chunk;
                assert_eq!(all, [LEN; 2], "{what}");
                assert_eq!(queries, [LEN, if wanted <= tail { wanted } else { of_chunks }], "{what}");
                for (got, want) in got.iter().zip(&want) {
                    assert!(max_diff(got, want) <= 1e-5 * max_abs(want), "{what}: {}", max_diff(got, want));
                }
            }
        }
    }
}

#[test]
fn queries_that_depend_on_others_are_all_computed() {
    let call = PrefillCall { layer: 1, softmax_scale: 1.0, prompt_len: LEN };
    assert_eq!(Dense.independent_queries(&call), usize::MAX);
    assert_eq!(s2o().independent_queries(&call), 8);
    let other_layer = s2o().layer_config(1, S2oConfig::builder().dense_tail(3).build().unwrap());
    assert_eq!(other_layer.independent_queries(&call), 3);
    assert_eq!(s2o().with_stats().independent_queries(&call), 0, "statistics are of all queries");
    assert_eq!(s2o().without_prompt_end().independent_queries(&call), 0, "the tail is that of the chunk");
    assert_eq!(S2o::new(S2oConfig::paper()).independent_queries(&call), 0, "no dense tail");
    let window = BlockSparse::new(SlidingWindow::default());
    assert_eq!(window.independent_queries(&call), 0, "the choice of keys may look at all queries");
}
