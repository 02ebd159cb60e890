//! GGUF files as llama.cpp's conversion writes them, with a tiny vocabulary.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use candle_core::Tensor;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use serde_json::Value as Json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// Vocabulary and merges of a tiny byte-level BPE: 256 bytes, one merge, three special tokens.
pub fn tiny_vocabulary() -> (Vec<String>, Vec<(String, String)>) {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut tokens: Vec<String> = alphabet.into_iter().map(String::from).collect();
    tokens.extend(["<|bos|>", "<|eos|>", "<|im_end|>", "th", "the"].map(str::to_owned));
    (tokens, vec![("t".to_owned(), "h".to_owned()), ("th".to_owned(), "e".to_owned())])
}

/// The order of the rows of a Llama head in llama.cpp's conversion (`LlamaModel.permute`).
fn permute(weight: &Tensor, num_heads: usize) -> Tensor {
    let rows = weight.dims()[0];
    let heads = weight.reshape((num_heads, 2, rows / num_heads / 2, weight.elem_count() / rows)).unwrap();
    heads.transpose(1, 2).unwrap().contiguous().unwrap().reshape(weight.shape()).unwrap()
}

fn gguf_name(name: &str) -> String {
    let pairs = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ];
    pairs.iter().fold(name.to_owned(), |name, (hf, gguf)| name.replace(hf, gguf))
}

/// The metadata of a model with the vocabulary of [`tiny_vocabulary`].
///
/// # Panics
/// If the configuration `json` lacks a number.
pub fn metadata(architecture: &str, json: &Json) -> Vec<(String, Value)> {
    let number = |key: &str| Value::U32(json[key].as_u64().unwrap() as u32);
    let head_dim = json["head_dim"].as_u64().unwrap_or(16) as u32;
    let strings = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let (tokens, merges) = tiny_vocabulary();
    // 1 is a normal token, 3 a control token.
    let types = (0..tokens.len()).map(|id| Value::I32(if (256..259).contains(&id) { 3 } else { 1 })).collect();
    let model = |key: &str| format!("{architecture}.{key}");
    let tokenizer = |key: &str| format!("tokenizer.ggml.{key}");
    vec![
        ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
        (model("context_length"), number("max_position_embeddings")),
        (model("embedding_length"), number("hidden_size")),
        (model("block_count"), number("num_hidden_layers")),
        (model("feed_forward_length"), number("intermediate_size")),
        (model("attention.head_count"), number("num_attention_heads")),
        (model("attention.head_count_kv"), number("num_key_value_heads")),
        (model("attention.key_length"), Value::U32(head_dim)),
        (model("attention.layer_norm_rms_epsilon"), Value::F32(json["rms_norm_eps"].as_f64().unwrap() as f32)),
        (model("rope.freq_base"), Value::F32(json["rope_theta"].as_f64().unwrap() as f32)),
        (tokenizer("model"), Value::String("gpt2".to_owned())),
        (tokenizer("pre"), Value::String("smollm".to_owned())),
        (tokenizer("tokens"), strings(tokens)),
        (tokenizer("merges"), strings(merges.iter().map(|(a, b)| format!("{a} {b}")).collect())),
        (tokenizer("token_type"), Value::Array(types)),
        (tokenizer("bos_token_id"), Value::U32(256)),
        (tokenizer("eos_token_id"), Value::U32(257)),
    ]
}

/// Writes a GGUF file.
///
/// # Panics
/// If that fails.
pub fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

/// The tensors of a model under llama.cpp's names, its matrices as `matrices` and the others in f32.
///
/// # Panics
/// If a matrix does not fill blocks of `matrices`, or `json` lacks a number of heads.
pub fn tensors(json: &Json, weights: &HashMap<String, Tensor>, matrices: GgmlDType) -> Vec<(String, QTensor)> {
    let is_llama = json["model_type"] == "llama";
    let heads = |key: &str| json[key].as_u64().unwrap() as usize;
    weights
        .iter()
        .map(|(name, weight)| {
            let weight = match name {
                name if is_llama && name.contains("q_proj") => permute(weight, heads("num_attention_heads")),
                name if is_llama && name.contains("k_proj") => permute(weight, heads("num_key_value_heads")),
                _ => weight.clone(),
            };
            let dtype = if weight.rank() == 2 { matrices } else { GgmlDType::F32 };
            (gguf_name(name), QTensor::quantize(&weight, dtype).unwrap())
        })
        .collect()
}
