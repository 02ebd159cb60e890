//! XAttention and its antidiagonal scores against their definition.

use std::ops::Range;

use candle_core::{Device, Tensor};
use candle_s2o::BLOCK_Q;
use proptest::prelude::*;
use s2o_baselines::{XAttention, antidiagonal_scores};

use crate::inputs::{Inputs, assert_dense, assert_takes_half_precision, calls, greatest_difference};
use crate::plain::{Compared, PlainHead, dot, softmax, top_cdf};

/// Scores by key block of the query block of rows `rows`, one pair of strides at a time; each sees `visible` strides.
pub fn block_row(
    head: &PlainHead,
    keys: &[Vec<f64>],
    rows: Range<usize>,
    stride: usize,
    visible: impl Fn(usize) -> usize,
) -> Vec<f64> {
    let mut scores = vec![0.0; keys.len().div_ceil(BLOCK_Q)];
    let offset = head.offset();
    for query_stride in (offset + rows.start) / stride..(offset + rows.end).div_ceil(stride) {
        let logits = (0..visible(query_stride)).map(|key_stride| {
            // The antidiagonal of the pair: indices inside the strides that add up to stride - 1.
            let products = (0..stride).map(|i| {
                let (query, key) = (query_stride * stride + stride - 1 - i, key_stride * stride + i);
                let query = query.checked_sub(offset).and_then(|row| head.q.get(row));
                query.zip(keys.get(key)).map_or(0.0, |(query, key)| dot(query, key))
            });
            head.scale * products.sum::<f64>() / stride as f64
        });
        for (key_stride, weight) in softmax(&logits.collect::<Vec<_>>()).into_iter().enumerate() {
            scores[key_stride * stride / BLOCK_Q] += weight;
        }
    }
    scores
}

/// Compares every list of a call.
pub fn compare(inputs: &Inputs, stride: usize, share: f64) -> Compared {
    let selection = inputs.select(&XAttention::default().stride(stride).unwrap().threshold(share).unwrap());
    let [q, k, _] = &inputs.tensors;
    let by_tensors = antidiagonal_scores(q, k, stride, inputs.call.softmax_scale).unwrap().flatten_to(1).unwrap();
    let by_tensors = by_tensors.to_vec3::<f32>().unwrap();
    inputs.compare(&selection, |number, head| {
        let rows = head.query_blocks().zip(&by_tensors[number]).map(|((diagonal, rows), by_tensors)| {
            let scores = block_row(head, &head.k, rows, stride, |query_stride| query_stride + 1);
            for (&plain, &score) in scores.iter().zip(by_tensors) {
                assert!((plain - f64::from(score)).abs() <= 1e-4 * plain + 1e-6, "{plain} {score}");
            }
            top_cdf(&scores[..=diagonal], |block| block == 0 || block == diagonal, share)
        });
        rows.collect()
    })
}

fn strides() -> impl Strategy<Value = usize> {
    prop_oneof![Just(8), Just(16), Just(32), Just(128)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn scores_and_chooses_as_defined(call in calls(), stride in strides(), share in 0.05..0.99f64) {
        compare(&call, stride, share).assert_decided(5, 200);
    }

    #[test]
    fn everything_is_dense(call in calls(), stride in strides()) {
        assert_dense(&call, XAttention::default().stride(stride).unwrap().threshold(1.0).unwrap());
    }

    #[test]
    fn half_precision(call in calls()) {
        assert_takes_half_precision(&call, XAttention::default());
    }
}

#[test]
fn scores_taken_in_parts_are_those_of_the_whole() {
    // Stride 1: more pairs than one part can hold, even for one head.
    let (offset, q_len) = (400, 6000);
    let rand = |len: usize, heads: usize| Tensor::rand(-2f32, 2.0, (1, len, heads, 8), &Device::Cpu).unwrap();
    let (q, k) = (rand(q_len, 2), rand(offset + q_len, 2));
    let scores = |start: usize, end: usize| {
        let (q, k) = (q.narrow(1, start - offset, end - start).unwrap(), k.narrow(1, 0, end).unwrap());
        antidiagonal_scores(&q, &k, 1, 1.0).unwrap()
    };
    let whole = scores(offset, offset + q_len);
    for (start, end) in [(offset, 1024), (1024, 2048), (4992, 5120), (5120, 5376), (6272, offset + q_len)] {
        let part = scores(start, end);
        let (_, _, rows, columns) = part.dims4().unwrap();
        let same = whole.narrow(2, start / BLOCK_Q - offset / BLOCK_Q, rows).unwrap().narrow(3, 0, columns).unwrap();
        assert!(greatest_difference(&same, &part) < 1e-4);
    }
}

#[test]
fn kv_heads_taken_in_parts_have_the_scores_of_each_alone() {
    // One part holds two of the three KV heads.
    let rand = |heads: usize| Tensor::rand(-2f32, 2.0, (1, 11_000, heads, 8), &Device::Cpu).unwrap();
    let (q, k) = (rand(6), rand(3));
    let scores = |first: usize, count: usize| {
        let (q, k) = (q.narrow(2, first * 2, count * 2).unwrap(), k.narrow(2, first, count).unwrap());
        antidiagonal_scores(&q, &k, 4, 1.0).unwrap()
    };
    let all = scores(0, 3);
    for head in 0..3 {
        assert!(greatest_difference(&all.narrow(1, head * 2, 2).unwrap(), &scores(head, 1)) < 1e-4);
    }
}
