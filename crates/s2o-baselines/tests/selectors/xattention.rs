//! XAttention and its antidiagonal scores against their definition.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{BLOCK_Q, Mask, PrefillCall, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, XAttention, antidiagonal_scores};

use crate::plain::{calls, head, lists};
use crate::plain_cdf::{Compared, assert_dense, assert_takes_half_precision, choice, dot, shape_of, softmax};

/// Scores by key block of the query block of rows `rows`, one pair of strides at a time; each sees `visible` strides.
pub fn block_row(
    queries: &[Vec<f64>],
    keys: &[Vec<f64>],
    (offset, rows): (usize, std::ops::Range<usize>),
    (stride, scale): (usize, f64),
    visible: impl Fn(usize) -> usize,
) -> Vec<f64> {
    let mut scores = vec![0.0; keys.len().div_ceil(BLOCK_Q)];
    let positions = offset + rows.start..offset + rows.end;
    for query_stride in positions.start / stride..positions.end.div_ceil(stride) {
        let logits: Vec<_> = (0..visible(query_stride))
            .map(|key_stride| {
                // The antidiagonal of the pair: indices inside the strides that add up to stride - 1.
                let products = (0..stride).map(|i| {
                    let (query, key) = (query_stride * stride + stride - 1 - i, key_stride * stride + i);
                    let query = query.checked_sub(offset).and_then(|row| queries.get(row));
                    query.zip(keys.get(key)).map_or(0.0, |(query, key)| dot(query, key))
                });
                Some(scale * products.sum::<f64>() / stride as f64)
            })
            .collect();
        for (key_stride, weight) in softmax(&logits).into_iter().enumerate() {
            scores[key_stride * stride / BLOCK_Q] += weight;
        }
    }
    scores
}

/// Compares every list of a call.
pub fn compare(call: &PrefillCall, tensors: &[Tensor; 3], stride: usize, share: f64) -> Compared {
    let [q, k, v] = tensors;
    let method = XAttention::default().stride(stride).unwrap().threshold(share).unwrap();
    let selection = method.select(call, q, k, v).unwrap();
    let shape = shape_of(tensors);
    assert_eq!(lists(&selection).check(&shape, Mask::Causal), Ok(()));
    let by_tensors = antidiagonal_scores(q, k, stride, call.softmax_scale).unwrap();
    let mut compared = Compared::default();
    let cut: Vec<_> = query_blocks(&shape, Mask::Causal).collect();
    for at in 0..shape.batch() * shape.num_heads() {
        let (batch, q_head) = (at / shape.num_heads(), at % shape.num_heads());
        let (queries, keys) = (head(q, batch, q_head), head(k, batch, shape.kv_head(q_head)));
        let by_tensors = by_tensors.get(batch).unwrap().get(q_head).unwrap().to_vec2::<f32>().unwrap();
        for (i, rows) in cut.iter().enumerate() {
            let place = (shape.q_offset(), rows.clone());
            let scale = f64::from(call.softmax_scale);
            let scores = block_row(&queries, &keys, place, (stride, scale), |query_stride| query_stride + 1);
            for (&plain, &score) in scores.iter().zip(&by_tensors[i]) {
                assert!((plain - f64::from(score)).abs() <= 1e-4 * plain + 1e-6, "{plain} {score}");
            }
            let diagonal = (shape.q_offset() + rows.start) / BLOCK_Q;
            let kept: Vec<_> = (0..=diagonal).map(|block| block == 0 || block == diagonal).collect();
            compared.list(&selection, at * cut.len() + i, &choice(&scores[..=diagonal], &kept, share));
        }
    }
    compared
}

fn strides() -> impl Strategy<Value = usize> {
    prop_oneof![Just(8), Just(16), Just(32), Just(128)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn scores_and_chooses_as_defined(call in calls(), stride in strides(), share in 0.05..0.99f64) {
        compare(&call.prefill(), &call.tensors(), stride, share).assert_decided();
    }

    #[test]
    fn everything_is_dense(call in calls(), stride in strides()) {
        let method = XAttention::default().stride(stride).unwrap().threshold(1.0).unwrap();
        assert_dense(method, &call.prefill(), &call.tensors());
    }

    #[test]
    fn half_precision(call in calls()) {
        assert_takes_half_precision(XAttention::default(), &call.prefill(), &call.tensors());
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
        let error = (same - part).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        assert!(error.to_scalar::<f32>().unwrap() < 1e-4);
    }
}

#[test]
fn options_out_of_range_are_refused() {
    for stride in [0, 3, 48, 256] {
        let error = XAttention::default().stride(stride).unwrap_err();
        assert_eq!(error.to_string(), format!("xattention: stride: expected a divisor of 128, got {stride}"));
    }
    let x = Tensor::zeros((1, 10, 1, 8), DType::F32, &Device::Cpu).unwrap();
    let error = antidiagonal_scores(&x, &x, 0, 1.0).unwrap_err();
    assert_eq!(error.to_string(), "antidiagonal scores: stride: expected a divisor of 128, got 0");
    let error = XAttention::default().threshold(2.0).unwrap_err();
    assert_eq!(error.to_string(), "xattention: threshold: expected a share above 0 up to 1, got 2");
}
