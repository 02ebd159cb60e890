//! Candle's own models, as the benchmarks time them, compute the same as our decoder on a checkpoint. On the CPU.

#[allow(dead_code, reason = "nothing is recorded here")]
#[path = "../../../benches/prefill/checkpoint.rs"]
mod checkpoint;
#[allow(dead_code, reason = "nothing is timed here")]
#[path = "../../../benches/prefill/logits.rs"]
mod logits;
#[path = "../../../benches/prefill/stock.rs"]
mod stock;

use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_flash_attn::s2o::{Policy, set_policy};
use candle_s2o::Dense;
use checkpoint::{Weights, checkpoint, prompt};
use s2o_models::{Decoder, PrefillOptions};
use stock::Stock;

const LLAMA: &str = r#"{
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
}"#;
const QWEN3: &str = r#"{
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": false
}"#;

#[test]
fn stock_models_compute_what_our_decoder_does() -> Result<()> {
    set_policy(Policy::Dense);
    for (name, json) in [("llama", LLAMA), ("qwen3", QWEN3)] {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.json"));
        std::fs::write(&path, json)?;
        let shape = path.to_str().expect("UTF-8");
        // Fewer layers and more positions than the shape has.
        let (config, vb) = checkpoint(shape, Weights::Random, Some(2), 300, &Device::Cpu)?;
        assert_eq!((config.num_layers, config.max_positions), (2, 300));
        // The same numbers in f32, so that rounding hides no error.
        let vb = vb.to_dtype(DType::F32);
        let tokens = Tensor::new(prompt(&config, 300), &Device::Cpu)?.unsqueeze(0)?;
        let decoder = Decoder::load(&config, &vb, None)?;
        let mut cache = decoder.new_cache(1, 300)?;
        let ours = decoder.prefill(&tokens, &mut cache, &Dense, PrefillOptions::new())?.last_logits()?;
        let mut model = Stock::load(&config, vb)?;
        for _ in 0..2 {
            model.clear()?;
            let (error, _) = logits::apart(&model.prefill(&tokens)?, &ours)?;
            assert!(error < 1e-4, "{}: {error}", model.name());
        }
    }
    Ok(())
}

#[test]
fn what_is_no_checkpoint_says_so() {
    let refused = |shape: &str, weights| match checkpoint(shape, weights, None, 1, &Device::Cpu) {
        Ok(_) => panic!("{shape} was taken"),
        Err(error) => error.to_string(),
    };
    let error = refused("llama-4", Weights::Random);
    assert!(error.contains("`llama-4`") && error.contains("expected `llama-3.1-8b`"), "{error}");
}
