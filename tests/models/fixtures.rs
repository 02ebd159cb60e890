//! Tiny random models and comparisons.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_s2o::{Attention, Dense, PrefillCall};
use s2o_models::weights::synthetic;
use s2o_models::{Decoder, DecoderConfig, PrefillOptions};
use s2o_testkit::gguf::tiny_vocabulary;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

/// A small Llama `config.json`.
pub(crate) fn llama_json() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "tie_word_embeddings": false, "eos_token_id": [257, 258],
    })
}

/// A small Qwen3 `config.json`, whose head width is not hidden / heads.
pub(crate) fn qwen3_json() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 256, "tie_word_embeddings": true,
        "attention_bias": false, "sliding_window": null, "use_sliding_window": false, "max_window_layers": 2,
        "eos_token_id": 257,
    })
}

/// `base` with some entries changed.
pub(crate) fn with(mut base: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

pub(crate) fn config(json: &Value) -> DecoderConfig {
    DecoderConfig::from_json(&json.to_string(), "test").unwrap()
}

pub(crate) fn weights(json: &Value, seed: u64) -> HashMap<String, Tensor> {
    synthetic::weights(&config(json), seed, &Device::Cpu).unwrap()
}

pub(crate) fn builder(weights: &HashMap<String, Tensor>) -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu)
}

/// Both architectures, qwen3 with biases.
pub(crate) fn both() -> [Value; 2] {
    [llama_json(), with(qwen3_json(), json!({"attention_bias": true}))]
}

pub(crate) fn decoder(json: &Value, seed: u64) -> Decoder {
    Decoder::load(&config(json), &builder(&weights(json, seed)), None).unwrap()
}

/// Tokens without a pattern, `(batch, len)`.
pub(crate) fn tokens(batch: usize, len: usize, vocab: u32) -> Tensor {
    let ids: Vec<u32> =
        (0..(batch * len) as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 8).map(|i| i % vocab).collect();
    Tensor::from_vec(ids, (batch, len), &Device::Cpu).unwrap()
}

/// Dense attention that first shows each call, with its q and k, to a closure.
pub(crate) struct Watched<F>(pub(crate) F);

impl<F> std::fmt::Debug for Watched<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

impl<F: Fn(&PrefillCall, &Tensor, &Tensor) -> candle_core::Result<()> + Send + Sync> Attention for Watched<F> {
    fn name(&self) -> &str {
        "watched"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        (self.0)(call, q, k)?;
        Dense.prefill(call, q, k, v)
    }
}

/// Logits of the last position after a prefill of `tokens` `(batch, len)` with dense attention.
pub(crate) fn last_logits(decoder: &Decoder, tokens: &Tensor) -> Tensor {
    let (batch, len) = tokens.dims2().unwrap();
    let mut cache = decoder.new_cache(batch, len).unwrap();
    decoder.prefill(tokens, &mut cache, &Dense, PrefillOptions::new()).unwrap().last_logits().unwrap()
}

pub(crate) fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// Largest absolute difference; a NaN counts as infinite.
pub(crate) fn max_diff(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let differences = values(a).into_iter().zip(values(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) })
}

pub(crate) fn max_abs(a: &Tensor) -> f32 {
    values(a).into_iter().fold(0.0, |max, v| max.max(v.abs()))
}

/// The tiny tokenizer with SmolLM's pre-tokenizer.
pub(crate) fn tiny_tokenizer() -> Tokenizer {
    let (tokens, merges) = tiny_vocabulary();
    let vocab: Vocab = tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect();
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).build().unwrap();
    let mut tokenizer = Tokenizer::new(bpe);
    let pieces = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
    tokenizer.with_pre_tokenizer(Some(Sequence::new(pieces)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    let special = |text: &str| AddedToken::from(text, true);
    tokenizer.add_special_tokens([special("<|bos|>"), special("<|eos|>"), special("<|im_end|>")]).unwrap();
    tokenizer
}

/// Writes a model directory in the Hugging Face layout.
pub(crate) fn write_directory(directory: &Path, json: &Value, weights: &HashMap<String, Tensor>) {
    std::fs::write(directory.join("config.json"), json.to_string()).unwrap();
    tiny_tokenizer().save(directory.join("tokenizer.json"), false).unwrap();
    candle_core::safetensors::save(weights, directory.join("model.safetensors")).unwrap();
}

/// Writes the same, the weights in two shards with an index.
pub(crate) fn write_sharded(directory: &Path, json: &Value, weights: &HashMap<String, Tensor>) {
    write_directory(directory, json, weights);
    std::fs::remove_file(directory.join("model.safetensors")).unwrap();
    let mut shards = [HashMap::new(), HashMap::new()];
    let mut map = serde_json::Map::new();
    for (i, (name, tensor)) in weights.iter().enumerate() {
        shards[i % 2].insert(name.clone(), tensor.clone());
        map.insert(name.clone(), json!(format!("model-0000{}-of-00002.safetensors", i % 2 + 1)));
    }
    for (i, shard) in shards.iter().enumerate() {
        let file = directory.join(format!("model-0000{}-of-00002.safetensors", i + 1));
        candle_core::safetensors::save(shard, file).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(directory.join("model.safetensors.index.json"), index).unwrap();
}
