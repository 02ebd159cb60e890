//! Options out of their range are refused with the range.

use std::fmt::Debug;

use candle_core::{DType, Device, Tensor};
use s2o_baselines::{
    BaselineError, BlockSelector, FlashPrefill, FlexPrefill, HeadPattern, MInference, MInferenceConfig, MeanPooling,
    Pbs, PbsScore, SlidingWindow, Sparge, SpargeBounds, SpargeConfig, SpargeHead, SpargeLayer, XAttention,
    antidiagonal_scores, block_means,
};

fn message<T: Debug>(refused: Result<T, BaselineError>) -> String {
    refused.unwrap_err().to_string()
}

#[test]
fn methods_are_named_as_in_tables() {
    let methods: [&dyn BlockSelector; 9] = [
        &FlashPrefill::default(),
        &FlexPrefill::default(),
        &MeanPooling::default(),
        &MInference::default(),
        &Pbs::default(),
        &Pbs::default().score(PbsScore::Antidiagonal),
        &SlidingWindow::default(),
        &Sparge::default(),
        &XAttention::default(),
    ];
    let expected = [
        "flashprefill",
        "flexprefill",
        "mean-pooling",
        "minference",
        "pbs",
        "pbs-antidiagonal",
        "sliding-window",
        "spargeattn",
        "xattention",
    ];
    assert_eq!(methods.map(|method| method.name()), expected);
}

#[test]
fn options_out_of_range_are_refused() {
    let (flex, sparge) = (FlexPrefill::default(), Sparge::default);
    let x = Tensor::zeros((1, 10, 1, 8), DType::F32, &Device::Cpu).unwrap();
    let none = HeadPattern::AShape { sink: 0, window: 0 };
    let no_blocks = MInferenceConfig { layers: [(3, vec![HeadPattern::BlockSparse { blocks: 0 }])].into() };
    let layer = SpargeLayer { heads: vec![SpargeHead { tau: 2.0, theta: 0.0 }], lambda: None };
    let all_and_more = SpargeConfig { layers: [(0, layer)].into() };
    for (got, expected) in [
        (message(flex.gamma(0.0)), "flexprefill: gamma: expected above 0, up to 1, got 0"),
        (message(flex.gamma(f64::NAN)), "flexprefill: gamma: expected above 0, up to 1, got NaN"),
        (message(flex.tau(1.5)), "flexprefill: tau: expected 0 to 1, got 1.5"),
        (message(block_means(&x, 0, 0)), "block means: block: expected at least 1 token, got 0"),
        (message(MInference::default().candidates([none])), "minference: window: expected at least 1 token, got 0"),
        (message(MInference::from_config(no_blocks)), "minference: blocks: expected at least 1, got 0"),
        (message(MInference::default().candidates([])), "minference: candidates: expected at least 1, got 0"),
        (message(Pbs::default().threshold(0.0)), "pbs: threshold: expected a share above 0 up to 1, got 0"),
        (message(SlidingWindow::new(0, 64)), "sliding-window: window: expected at least 1 token, got 0"),
        (message(sparge().tau(0.0)), "spargeattn: tau: expected above 0, up to 1, got 0"),
        (message(sparge().theta(1.5)), "spargeattn: theta: expected -1 to 1, got 1.5"),
        (message(sparge().lambda(Some(0.0))), "spargeattn: lambda: expected below 0, got 0"),
        (message(sparge().lambda(Some(f32::NAN))), "spargeattn: lambda: expected below 0, got NaN"),
        (message(Sparge::from_config(all_and_more)), "spargeattn: tau: expected above 0, up to 1, got 2"),
        (message(SpargeBounds::new(0.1, 0.05)), "spargeattn: l2: expected at least l1, got 0.05"),
        (message(antidiagonal_scores(&x, &x, 0, 1.0)), "antidiagonal scores: stride: expected a divisor of 128, got 0"),
        (
            message(XAttention::default().threshold(2.0)),
            "xattention: threshold: expected a share above 0 up to 1, got 2",
        ),
    ] {
        assert_eq!(got, expected);
    }
    for got in [0.0, -1.0, 1.1, f64::NAN] {
        let expected = format!("mean-pooling: threshold: expected a share above 0 up to 1, got {got}");
        assert_eq!(message(MeanPooling::default().threshold(got)), expected);
    }
    for got in [-0.1, 1.1, f64::NAN] {
        let expected = format!("flashprefill: alpha: expected a number from 0 to 1, got {got}");
        assert_eq!(message(FlashPrefill::default().alpha(got)), expected);
    }
    for got in [0, 64, 200, 16384] {
        let expected = format!("pbs: segment: expected a multiple of 128 up to 8192, got {got}");
        assert_eq!(message(Pbs::default().segment(got)), expected);
    }
    for got in [0, 3, 48, 256] {
        let expected = format!("xattention: stride: expected a divisor of 128, got {got}");
        assert_eq!(message(XAttention::default().stride(got)), expected);
    }
}
