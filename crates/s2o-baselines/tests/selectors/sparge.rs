//! SpargeAttn against its definition, one head at a time in f64.

use candle_core::{DType, Tensor};
use candle_s2o::{BLOCK_Q, Mask, PrefillCall, dense_attn, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{
    BlockSelector, BlockSparse, Sparge, SpargeBounds, SpargeConfig, SpargeHead, SpargeLayer, TuningCall,
};

use crate::inputs::{Inputs, assert_causal, assert_dense, calls, lists};
use crate::plain::{Compared, PlainHead, dot, mean, softmax, top_cdf};
use crate::vectors;

const BLOCK_K: usize = 64;

/// Mean cosine between all pairs of rows.
fn similarity(rows: &[Vec<f64>]) -> f64 {
    let mut sum = 0.0;
    for a in rows {
        for b in rows {
            sum += dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        }
    }
    sum / (rows.len() * rows.len()) as f64
}

/// The choices of each query block; `None` if a similarity is too close to theta to decide.
fn expected(head: &PlainHead, tau: f64, theta: f64) -> Option<Vec<Vec<Option<bool>>>> {
    let mean_key = mean(&head.k);
    let keys: Vec<Vec<f64>> =
        head.k.iter().map(|key| key.iter().zip(&mean_key).map(|(x, mean)| x - mean).collect()).collect();
    let alike: Vec<f64> = keys.chunks(BLOCK_K).map(similarity).collect();
    let means: Vec<Vec<f64>> = keys.chunks(BLOCK_K).map(mean).collect();
    let close = |similarity: f64| (similarity - theta).abs() < 1e-4;
    if alike.iter().any(|&similarity| close(similarity)) {
        return None;
    }
    let rows = head.query_blocks().map(|(block, rows)| {
        let (query, similarity) = (mean(&head.q[rows.clone()]), similarity(&head.q[rows]));
        let causal = ((block + 1) * (BLOCK_Q / BLOCK_K)).min(means.len());
        let trusted: Vec<usize> = (0..causal).filter(|&key_block| alike[key_block] >= theta).collect();
        let scores: Vec<f64> = trusted.iter().map(|&key_block| head.scale * dot(&query, &means[key_block])).collect();
        let mut row = vec![Some(true); causal];
        for (&key_block, chosen) in trusted.iter().zip(top_cdf(&softmax(&scores), |_| false, tau)) {
            if similarity >= theta && key_block > 0 && key_block / 2 != block {
                row[key_block] = chosen;
            }
        }
        (!close(similarity)).then_some(row)
    });
    rows.collect()
}

fn compare(inputs: &Inputs, tau: f64, theta: f64) -> Compared {
    let selection = inputs.select(&Sparge::default().tau(tau).unwrap().theta(theta).unwrap());
    inputs.compare(&selection, |_, head| expected(head, tau, theta).unwrap_or_default())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn blocks_of_the_definition(call in calls(), tau in 0.3..0.99f64, theta in -0.2..0.8f64) {
        compare(&call, tau, theta).assert_decided(4, 20);
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(&call, Sparge::default().tau(1.0).unwrap().lambda(None).unwrap());
    }

    #[test]
    fn queries_see_no_later_key(call in calls()) {
        assert_causal(&call, &Sparge::default().tau(0.5).unwrap().theta(0.1).unwrap());
    }

}

#[test]
fn real_tensors() {
    for inputs in vectors::smollm2() {
        for (tau, theta) in [(0.98, 0.6), (0.9, 0.1), (0.7, 0.3), (0.5, -1.0)] {
            for inputs in [inputs.clone(), inputs.in_dtype(DType::BF16)] {
                compare(&inputs, tau, theta).assert_decided(1, 50);
            }
        }
    }
    // No block of this head is as self-similar as the default requires.
    let [density, _, l1] = vectors::measure(Sparge::default());
    assert!(density == 1.0 && l1 < 1e-5, "{density} {l1}");
    let [density, _, l1] = vectors::measure(Sparge::default().tau(0.9).unwrap().theta(0.1).unwrap());
    assert!(density < 0.3 && l1 < 0.1, "{density} {l1}");
}

/// Two layers, one of them with two calls.
fn tuning_calls() -> Vec<TuningCall> {
    [0, 3, 3].into_iter().zip(vectors::smollm2()).map(|(layer, inputs)| tuning_call(layer, &inputs)).collect()
}

/// Three heads over one KV head: unchanged, flatter and more peaked.
fn tuning_call(layer: usize, inputs: &Inputs) -> TuningCall {
    let [q, k, v] = inputs.tensors.clone();
    let q = Tensor::cat(&[q.clone(), (&q * 0.3).unwrap(), (&q * 2.0).unwrap()], 2).unwrap();
    TuningCall { call: PrefillCall { layer, ..inputs.call }, q, k, v }
}

/// By head, the relative L1 error and the density.
fn outcome(sparge: &Sparge, TuningCall { call, q, k, v }: &TuningCall) -> Vec<(f64, f64)> {
    let selection = sparge.select(call, q, k, v).unwrap();
    let (out, work) = BlockSparse::<Sparge>::attend(call, [q, k, v], selection).unwrap();
    let dense = dense_attn(q, k, v, call.softmax_scale, Mask::Causal).unwrap();
    let sum = |x: &Tensor, head: usize| -> f64 {
        let values = x.narrow(2, head, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(|x| f64::from(x.abs())).sum()
    };
    let error = (&out - &dense).unwrap();
    work.iter().enumerate().map(|(head, work)| (sum(&error, head) / sum(&dense, head), work.density())).collect()
}

#[test]
fn the_tuner_keeps_its_bounds() {
    let calls = tuning_calls();
    let mut last: Option<Vec<f64>> = None;
    for (l1, l2) in [(0.01, 0.012), (0.08, 0.09), (0.3, 0.35)] {
        let bounds = SpargeBounds::new(l1, l2).unwrap();
        assert_eq!((bounds.l1(), bounds.l2()), (l1, l2));
        let config = Sparge::tune(&calls, bounds).unwrap();
        assert_eq!(config.layers.keys().copied().collect::<Vec<_>>(), [0, 3]);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<SpargeConfig>(&json).unwrap(), config);
        // The loosest bounds allow the greatest lambda.
        assert!(l2 < 0.35 || config.layers.values().all(|layer| layer.lambda == Some(-4.0)));
        let sparge = Sparge::from_config(config.clone()).unwrap();
        let mut without_lambda = config;
        without_lambda.layers.values_mut().for_each(|layer| layer.lambda = None);
        let blocks_only = Sparge::from_config(without_lambda).unwrap();
        let mut density = vec![0.0; 6];
        for call in &calls {
            for (head, (error, of_call)) in outcome(&sparge, call).into_iter().enumerate() {
                assert!(error <= l2 + 1e-6, "layer {}: {error} above {l2}", call.call.layer);
                density[call.call.layer + head] += of_call;
            }
            assert!(outcome(&blocks_only, call).iter().all(|&(error, _)| error <= l1 + 1e-6));
        }
        if let Some(tighter) = last.replace(density.clone()) {
            assert!(density.iter().zip(tighter).all(|(looser, tighter)| *looser <= tighter + 1e-9));
        }
    }
    assert!(last.unwrap().iter().all(|&density| density < 0.9), "every head skips blocks");
}

#[test]
fn calls_of_a_layer_have_the_same_heads() {
    let calls = vectors::smollm2();
    let [one, mut two] = [tuning_call(2, &calls[3]), tuning_call(2, &calls[3])];
    two.q = two.q.narrow(2, 0, 2).unwrap();
    let error = Sparge::tune(&[one, two], SpargeBounds::default()).unwrap_err();
    assert_eq!(error.to_string(), "spargeattn: layer 2: expected settings of 3 heads, got 2");
    assert_eq!(Sparge::tune(&[], SpargeBounds::default()).unwrap(), SpargeConfig::default());
}

#[test]
fn settings_are_by_layer_and_head() {
    let call = tuning_call(3, &vectors::smollm2()[0]);
    let heads = [1.0, 0.3, 0.3].map(|tau| SpargeHead { tau, theta: -1.0 }).to_vec();
    let layers = [(3, SpargeLayer { heads, lambda: Some(-5.0) })].into();
    let sparge = Sparge::from_config(SpargeConfig { layers }).unwrap();
    let select = |layer: usize| sparge.select(&PrefillCall { layer, ..call.call }, &call.q, &call.k, &call.v);
    let shape = &vectors::smollm2()[0].shape;
    let selection = select(3).unwrap();
    assert_eq!(lists(&selection).value_threshold, Some(-5.0));
    let rows = query_blocks(shape, Mask::Causal).len();
    let blocks = |head: usize| (0..rows).map(|i| lists(&selection).blocks.list(head * rows + i).len()).sum::<usize>();
    assert_eq!(blocks(0), (1..=rows).map(|n| 2 * n).sum::<usize>());
    assert!(blocks(2) < blocks(0));
    assert_eq!(lists(&select(0).unwrap()).value_threshold, Some(-50.0));
    let all_layers = Sparge::default().lambda(Some(-7.0)).unwrap();
    let selection = all_layers.select(&call.call, &call.q, &call.k, &call.v).unwrap();
    assert_eq!(lists(&selection).value_threshold, Some(-7.0));
    let error = sparge.select(&call.call, &call.q.narrow(2, 0, 2).unwrap(), &call.k, &call.v).unwrap_err();
    assert_eq!(error.to_string(), "spargeattn: layer 3: expected settings of 2 heads, got 3");
}

#[test]
fn a_configuration_is_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spargeattn.json");
    let heads = vec![SpargeHead { tau: 0.9, theta: 0.5 }, SpargeHead { tau: 1.0, theta: 0.0 }];
    let layer = SpargeLayer { heads, lambda: Some(-10.0) };
    let layers = [(0, SpargeLayer { lambda: None, ..layer.clone() }), (11, layer)].into();
    let config = SpargeConfig { layers };
    config.save(&path).unwrap();
    assert_eq!(SpargeConfig::load(&path).unwrap(), config);
    assert_eq!(Sparge::from_config(config.clone()).unwrap().config(), &config);
    for (text, words) in [
        (r#"{"layers":{},"l1":0.1}"#, "unknown field `l1`"),
        (r#"{"layers":{"0":{"heads":[],"lamda":-1}}}"#, "unknown field `lamda`"),
        (r#"{"layers":{"0":{"heads":[{"tau":1,"theta":0,"pv":0}],"lambda":null}}}"#, "unknown field `pv`"),
        (r#"{"layers":{"0":{"heads":[{"tau":1}],"lambda":null}}}"#, "missing field `theta`"),
        ("", "EOF"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = SpargeConfig::load(&path).unwrap_err().to_string();
        let expected = "spargeattn.json: expected settings of SpargeAttn by layer and head, got ";
        assert!(error.contains(&format!("{expected}{words}")), "{error}");
    }
    let error = SpargeConfig::load(directory.path().join("none")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("none: No such file"), "{error}");
}
