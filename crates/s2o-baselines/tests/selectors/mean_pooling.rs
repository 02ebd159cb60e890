//! Mean pooling against its definition.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{BLOCK_Q, Mask, PrefillCall, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, MeanPooling, block_means};

use crate::plain::{calls, head, lists};
use crate::plain_cdf::{Compared, assert_dense, assert_takes_half_precision, choice, dot, mean, shape_of, softmax};

/// Compares every list of a call.
pub fn compare(call: &PrefillCall, tensors: &[Tensor; 3], share: f64) -> Compared {
    let [q, k, v] = tensors;
    let selection = MeanPooling::default().threshold(share).unwrap().select(call, q, k, v).unwrap();
    let shape = shape_of(tensors);
    assert_eq!(lists(&selection).check(&shape, Mask::Causal), Ok(()));
    let cut: Vec<_> = query_blocks(&shape, Mask::Causal).collect();
    let mut compared = Compared::default();
    for list in 0..shape.batch() * shape.num_heads() * cut.len() {
        let (at, rows) = (list / cut.len(), cut[list % cut.len()].clone());
        let (batch, q_head) = (at / shape.num_heads(), at % shape.num_heads());
        let (queries, keys) = (head(q, batch, q_head), head(k, batch, shape.kv_head(q_head)));
        let diagonal = (shape.q_offset() + rows.start) / BLOCK_Q;
        let query = mean(&queries[rows]);
        let logits: Vec<_> = keys
            .chunks(BLOCK_Q)
            .take(diagonal + 1)
            .map(|block| Some(f64::from(call.softmax_scale) * dot(&query, &mean(block))))
            .collect();
        let mut plain = choice(&softmax(&logits), &vec![false; logits.len()], share);
        plain[0] = Some(true);
        plain[diagonal] = Some(true);
        compared.list(&selection, list, &plain);
    }
    compared
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn chooses_as_defined(call in calls(), share in 0.05..0.99f64) {
        compare(&call.prefill(), &call.tensors(), share).assert_decided();
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(MeanPooling::default().threshold(1.0).unwrap(), &call.prefill(), &call.tensors());
    }

    #[test]
    fn half_precision(call in calls()) {
        assert_takes_half_precision(MeanPooling::default(), &call.prefill(), &call.tensors());
    }
}

#[test]
fn means_taken_in_parts_are_those_of_the_whole() {
    // This is more than one part can hold.
    let (len, heads, dim) = (40_000, 8, 128);
    let x = Tensor::rand(-1f32, 1.0, (1, len, heads, dim), &Device::Cpu).unwrap();
    let whole = block_means(&x, 60, BLOCK_Q).unwrap();
    let middle = 200 * BLOCK_Q;
    let halves = [(60, middle), (middle, 60 + len)]
        .map(|(start, end)| block_means(&x.narrow(1, start - 60, end - start).unwrap(), start, BLOCK_Q).unwrap());
    assert_eq!(whole.dims(), [1, heads, (60 + len).div_ceil(BLOCK_Q), dim]);
    let error = (whole - Tensor::cat(&halves, 2).unwrap()).unwrap().abs().unwrap().flatten_all().unwrap();
    assert_eq!(error.max(0).unwrap().to_scalar::<f32>().unwrap(), 0.0);
}

#[test]
fn blocks_of_nothing_are_refused() {
    let error = block_means(&Tensor::zeros((1, 10, 1, 8), DType::F32, &Device::Cpu).unwrap(), 0, 0).unwrap_err();
    assert_eq!(error.to_string(), "block means: block: expected at least 1 token, got 0");
}

#[test]
fn thresholds_are_shares() {
    for threshold in [0.0, -1.0, 1.1, f64::NAN] {
        let error = MeanPooling::default().threshold(threshold).unwrap_err();
        let expected = format!("mean-pooling: threshold: expected a share above 0 up to 1, got {threshold}");
        assert_eq!(error.to_string(), expected);
    }
}
