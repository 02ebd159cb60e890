//! RoPE scalings against Hugging Face's definitions, and the rotation in the q that attention gets.

use std::f64::consts::PI;
use std::sync::Mutex;

use candle_core::Tensor;
use candle_s2o::PrefillCall;
use s2o_models::{DecoderConfig, PrefillOptions};
use serde_json::{Value, json};

use crate::fixtures::*;

fn scaled(scaling: Value) -> DecoderConfig {
    config(&with(qwen3_json(), json!({"rope_scaling": scaling})))
}

fn assert_close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*got) / expected - 1.0).abs() < 1e-6, "frequency {i}: {got}, expected {expected}");
    }
}

/// `rope_theta ** -(2 i / dim)` for the fixture's head of 32.
fn plain() -> Vec<f64> {
    (0..16).map(|i| 1.0 / 1e6f64.powf(2.0 * f64::from(i) / 32.0)).collect()
}

#[test]
fn linear_divides_every_frequency() {
    let config = scaled(json!({"type": "linear", "factor": 4.0}));
    let expected: Vec<f64> = plain().iter().map(|f| f / 4.0).collect();
    assert_close(&config.rope.inverse_frequencies(32), &expected);
    assert_eq!(config.rope.attention_factor(), 1.0);
}

#[test]
fn llama3_divides_low_frequencies_only() {
    // From `_compute_llama3_parameters` in transformers' modeling_rope_utils.
    let (factor, low, high, old) = (8.0, 1.0, 4.0, 8192.0);
    let config = scaled(json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": 8192}));
    let expected: Vec<f64> = plain()
        .iter()
        .map(|freq| {
            let wavelen = 2.0 * PI / freq;
            if wavelen < old / high {
                *freq
            } else if wavelen > old / low {
                freq / factor
            } else {
                let smooth = (old / wavelen - low) / (high - low);
                (1.0 - smooth) * freq / factor + smooth * freq
            }
        })
        .collect();
    assert_close(&config.rope.inverse_frequencies(32), &expected);
    assert_close(&config.rope.inverse_frequencies(32)[..1], &[1.0]);
    assert_close(&config.rope.inverse_frequencies(32)[15..], &[plain()[15] / 8.0]);
}

#[test]
fn yarn_follows_the_paper() {
    // From `_compute_yarn_parameters` in transformers' modeling_rope_utils, for Qwen3's recommended extension.
    let config = scaled(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}));
    let correction_dim = |rotations: f64| 32.0 * (32768.0 / (rotations * 2.0 * PI)).ln() / (2.0 * 1e6f64.ln());
    let (low, high) = (correction_dim(32.0).floor().max(0.0), correction_dim(1.0).ceil().min(31.0));
    assert_eq!((low, high), (5.0, 10.0));
    let expected: Vec<f64> = plain()
        .iter()
        .enumerate()
        .map(|(i, freq)| {
            let extrapolation = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            freq / 4.0 * (1.0 - extrapolation) + freq * extrapolation
        })
        .collect();
    assert_close(&config.rope.inverse_frequencies(32), &expected);
    assert!((config.rope.attention_factor() - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!(config.max_positions, 131_072, "the extension, not the short max_position_embeddings beside it");

    let given = scaled(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}));
    assert_eq!(given.rope.attention_factor(), 1.25);
    let scales = json!({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0});
    let expected = (0.2 * 4f64.ln() + 1.0) / (0.1 * 4f64.ln() + 1.0);
    assert!((scaled(scales).rope.attention_factor() - expected).abs() < 1e-12);
}

#[test]
fn transformers_5_keeps_it_elsewhere() {
    let mut json = qwen3_json();
    json.as_object_mut().unwrap().remove("rope_theta");
    json["rope_parameters"] = json!({"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0});
    let expected: Vec<f64> = plain().iter().map(|f| f / 2.0).collect();
    assert_close(&config(&json).rope.inverse_frequencies(32), &expected);
}

/// q of layer 0, first head, at every position: `(len, head_dim)`.
fn first_head(json: &Value, len: usize) -> Vec<Vec<f32>> {
    let decoder = decoder(json, 21);
    let mut cache = decoder.new_cache(1, len).unwrap();
    let captured = Mutex::new(Vec::new());
    let capture = Watched(|call: &PrefillCall, q: &Tensor, _: &Tensor| {
        if call.layer == 0 {
            captured.lock().unwrap().push(q.clone());
        }
        Ok(())
    });
    let same = Tensor::full(5u32, (1, len), decoder.device()).unwrap();
    decoder.prefill(&same, &mut cache, &capture, PrefillOptions::new().chunk(50)).unwrap();
    let q = Tensor::cat(&captured.lock().unwrap(), 1).unwrap();
    q.get(0).unwrap().narrow(1, 0, 1).unwrap().squeeze(1).unwrap().to_vec2().unwrap()
}

#[test]
fn positions_turn_half_split_pairs() {
    // The same token everywhere, so layer 0's q differ only by their rotation.
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    for json in [qwen3_json(), with(qwen3_json(), json!({"rope_scaling": yarn})), llama_json()] {
        let config = config(&json);
        let half = config.head_dim / 2;
        let frequencies = config.rope.inverse_frequencies(config.head_dim);
        let q = first_head(&json, 200);
        for position in [1, 49, 50, 199] {
            for i in 0..half {
                let (sin, cos) = (position as f64 * f64::from(frequencies[i])).sin_cos();
                let (x, y) = (f64::from(q[0][i]), f64::from(q[0][i + half]));
                let (got_x, got_y) = (f64::from(q[position][i]), f64::from(q[position][i + half]));
                assert!((got_x - (x * cos - y * sin)).abs() < 1e-4, "position {position}, entry {i}");
                assert!((got_y - (y * cos + x * sin)).abs() < 1e-4, "position {position}, entry {i}");
            }
        }
    }
    let scaled = with(qwen3_json(), json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}));
    let (plain, scaled) = (first_head(&qwen3_json(), 1), first_head(&scaled, 1));
    let factor = (0.1 * 4f64.ln() + 1.0) as f32;
    for (plain, scaled) in plain[0].iter().zip(&scaled[0]) {
        assert!((plain * factor - scaled).abs() < 1e-5, "YaRN scales q and k by its attention factor");
    }
}
