//! Logits equal those of candle-transformers' `llama` and `qwen3` on the same weights.

use candle_core::{DType, Device, Tensor};
use candle_transformers::models::{llama, qwen3};
use serde_json::{Value, json};

use crate::fixtures::*;

const TOLERANCE: f32 = 1e-4;
const LENGTHS: [usize; 4] = [1, 7, 65, 130];

fn ours(json: &Value, tokens: &Tensor) -> Tensor {
    last_logits(&decoder(json, 7), tokens)
}

fn candle_llama(json: &Value, tokens: &Tensor) -> Tensor {
    let config: llama::LlamaConfig = serde_json::from_value(json.clone()).unwrap();
    let config = config.into_config(false);
    let model = llama::Llama::load(builder(&weights(json, 7)), &config).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    model.forward(tokens, 0, &mut cache).unwrap()
}

fn candle_qwen3(json: &Value, tokens: &Tensor) -> Tensor {
    let config: qwen3::Config = serde_json::from_value(json.clone()).unwrap();
    let mut model = qwen3::ModelForCausalLM::new(&config, builder(&weights(json, 7))).unwrap();
    model.forward(tokens, 0).unwrap().squeeze(1).unwrap()
}

fn compare(json: &Value, theirs: fn(&Value, &Tensor) -> Tensor) {
    for (batch, len) in LENGTHS.iter().map(|len| (1, *len)).chain([(2, 7), (2, 65)]) {
        let tokens = tokens(batch, len, 288);
        let (ours, theirs) = (ours(json, &tokens), theirs(json, &tokens));
        let difference = max_diff(&ours, &theirs);
        assert!(difference < TOLERANCE, "batch {batch}, len {len}: {difference} in {json}");
        assert!(max_abs(&theirs) > 0.5, "logits too small to tell anything");
    }
}

#[test]
fn llama_with_many_few_and_one_kv_head() {
    compare(&llama_json(), candle_llama);
    compare(&with(llama_json(), json!({"num_key_value_heads": 4})), candle_llama);
    compare(&with(llama_json(), json!({"num_key_value_heads": 1, "tie_word_embeddings": true})), candle_llama);
}

#[test]
fn llama_3_1_rope_scaling() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let scaled = with(llama_json(), json!({"rope_theta": 500000.0, "rope_scaling": scaling}));
    compare(&scaled, candle_llama);
    let plain = with(llama_json(), json!({"rope_theta": 500000.0}));
    let tokens = tokens(1, 130, 288);
    assert!(max_diff(&ours(&scaled, &tokens), &ours(&plain, &tokens)) > 1e-2, "the scaling changes nothing");
}

#[test]
fn qwen3_tied_and_untied_with_bias() {
    compare(&qwen3_json(), candle_qwen3);
    let changes = json!({"num_key_value_heads": 4, "tie_word_embeddings": false, "attention_bias": true});
    compare(&with(qwen3_json(), changes), candle_qwen3);
}
