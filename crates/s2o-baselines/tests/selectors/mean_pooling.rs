//! Mean pooling against its definition.

use candle_core::{Device, Tensor};
use candle_s2o::BLOCK_Q;
use proptest::prelude::*;
use s2o_baselines::{MeanPooling, block_means};

use crate::inputs::{Inputs, assert_dense, assert_takes_half_precision, calls, greatest_difference};
use crate::plain::{Compared, top_cdf};

/// Compares every list of a call.
pub fn compare(inputs: &Inputs, share: f64) -> Compared {
    let selection = inputs.select(&MeanPooling::default().threshold(share).unwrap());
    inputs.compare(&selection, |_, head| {
        let rows = head.pooled().into_iter().map(|scores| {
            let mut plain = top_cdf(&scores, |_| false, share);
            (plain[0], plain[scores.len() - 1]) = (Some(true), Some(true));
            plain
        });
        rows.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn chooses_as_defined(call in calls(), share in 0.05..0.99f64) {
        compare(&call, share).assert_decided(5, 200);
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(&call, MeanPooling::default().threshold(1.0).unwrap());
    }

    #[test]
    fn half_precision(call in calls()) {
        assert_takes_half_precision(&call, MeanPooling::default());
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
    assert_eq!(greatest_difference(&whole, &Tensor::cat(&halves, 2).unwrap()), 0.0);
}
