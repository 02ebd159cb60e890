//! Candle's own text decoders on the CPU with the drop-in, each with tiny random weights: exact attention by the
//! drop-in against the model's attention without flash-attn, and the number of sparse calls under a policy that makes
//! every long causal call sparse.
//!
//! These are all text decoders of candle-transformers 0.11.1 that call flash-attn. Other models that do are `mimi`
//! (audio; its switch for flash-attn is always off), and `mmdit`, `stable_diffusion`, `wuerstchen` and `z_image`
//! (images; their calls are not causal, so they are exact).
//!
//! A `VarMap` starts matrices and embeddings at random, and norms at 1. Gemma's norms start at 0 and add 1.

use std::io::Cursor;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use candle_flash_attn::s2o::{self, Policy, S2oConfig, SegmentLen};
use candle_nn::init::{DEFAULT_KAIMING_NORMAL, ONE};
use candle_nn::{VarBuilder, VarMap};
use candle_s2o::StopRule;
use candle_transformers::models::{
    gemma, gemma2, gemma3, gemma4, granite, granitemoehybrid, helium, lfm2, llama, mistral, mixtral, quantized_phi3,
    qwen3, stable_lm, voxtral,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

const PROMPT_LEN: usize = 700;

/// What the models' `config.json` have in common. Models ignore names that they do not know. The window is longer than
/// the prompt, because no model passes its window to flash-attn: with a shorter one the stock models would differ.
const CONFIG: &str = r#"{
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "sliding_window": 1024, "attention_bias": false, "mlp_bias": false,
    "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2
}"#;

/// Builds the model with `weights`, which it initialises on the first run, and returns its [`logits`].
type Run = fn(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]>;

struct Stock {
    name: &'static str,
    /// Causal calls for the prompt: the number of layers that call flash-attn.
    sparse_calls: usize,
    /// Bound on the relative difference between the model with and without flash-attn.
    tolerance: f32,
    run: Run,
}

const fn stock(name: &'static str, sparse_calls: usize, run: Run) -> Stock {
    Stock { name, sparse_calls, tolerance: 1e-3, run }
}

const MODELS: [Stock; 15] = [
    stock("gemma", 2, gemma),
    stock("gemma2", 2, gemma2),
    stock("gemma3", 2, gemma3),
    stock("gemma4", 2, gemma4),
    stock("granite", 2, granite),
    stock("granitemoehybrid", 2, granitemoehybrid),
    stock("helium", 2, helium),
    stock("lfm2", 1, lfm2),
    stock("llama", 2, llama),
    stock("mistral", 2, mistral),
    stock("mixtral", 2, mixtral),
    // It converts queries, keys and values to bf16 for flash-attn, and only for flash-attn.
    Stock { tolerance: 3e-2, ..stock("quantized_phi3", 2, quantized_phi3) },
    stock("qwen3", 0, qwen3),
    stock("stable_lm", 2, stable_lm),
    stock("voxtral", 2, voxtral),
];

/// One test, because the policy and the statistics belong to the process.
#[test]
fn stock_models_are_exact_when_dense_and_counted_when_sparse() {
    let failure = |stock: &Stock| check(stock).err().map(|error| format!("{}: {error:#}", stock.name));
    let failures: Vec<String> = MODELS.iter().filter_map(failure).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn check(stock: &Stock) -> Result<()> {
    let weights = VarMap::new();
    let expected = (stock.run)(false, &weights).context("without flash-attn")?;
    s2o::set_policy(Policy::Dense);
    let dense = apart(&(stock.run)(true, &weights).context("dense")?, &expected)?;
    ensure!(dense.iter().all(|&apart| apart < stock.tolerance), "dense: {dense:?} from without flash-attn");

    s2o::set_policy(Policy::S2o(eager()?));
    s2o::collect_stats(true);
    let sparse = apart(&(stock.run)(true, &weights).context("sparse")?, &expected)?;
    let calls = s2o::take_stats()?;
    // The token after the prompt needs no mask and is exact.
    let seen: Vec<_> = calls.iter().map(|call| (call.q_len, call.k_len, call.stats.density())).collect();
    ensure!(seen.len() == stock.sparse_calls, "expected {} sparse calls, got {seen:?}", stock.sparse_calls);
    let is_sparse = |&(q_len, k_len, density): &(usize, usize, f64)| [q_len, k_len] == [PROMPT_LEN; 2] && density < 1.0;
    ensure!(seen.iter().all(is_sparse), "(queries, keys, density): {seen:?}");
    let bound = if calls.is_empty() { stock.tolerance } else { 1.0 };
    ensure!(sparse.iter().all(|&apart| apart < bound), "sparse: {sparse:?} from without flash-attn");
    Ok(())
}

/// Skips as much as possible. The rule of all rows would stop too late to skip anything in some heads of a prompt this
/// short, because the scores of random weights differ widely from row to row.
fn eager() -> Result<S2oConfig> {
    let config = S2oConfig::builder().tau(0.9).segment_len(SegmentLen::Fixed(128)).dense_below(1).dense_tail(1);
    Ok(config.stop_rule(StopRule::SumRatio).build()?)
}

/// Differences in the L2 norm, relative to `expected`. NaN is below no bound.
fn apart(got: &[Tensor; 2], expected: &[Tensor; 2]) -> Result<Vec<f32>> {
    let norm = |tensor: &Tensor| -> Result<f32> { Ok(tensor.sqr()?.sum_all()?.sqrt()?.to_scalar()?) };
    got.iter().zip(expected).map(|(got, expected)| Ok(norm(&(got - expected)?)? / norm(expected)?)).collect()
}

/// The logits after the prompt, and after one more token. `forward` takes token ids and the position of the first.
fn logits(mut forward: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>) -> Result<[Tensor; 2]> {
    let ids: Vec<u32> = (0..=PROMPT_LEN as u32).map(|i| (i * i + 7 * i) % 61).collect();
    let (prompt, next) = ids.split_at(PROMPT_LEN);
    let prompt = forward(&Tensor::new(prompt, &Device::Cpu)?.unsqueeze(0)?, 0)?;
    let next = forward(&Tensor::new(next, &Device::Cpu)?.unsqueeze(0)?, PROMPT_LEN)?;
    Ok([prompt, next])
}

/// [`CONFIG`] with the settings of one model.
fn config<T: DeserializeOwned>(use_flash_attn: bool, own: Value) -> Result<T> {
    let mut config: Map<String, Value> = serde_json::from_str(CONFIG)?;
    config.insert("use_flash_attn".to_owned(), Value::Bool(use_flash_attn));
    if let Value::Object(own) = own {
        config.extend(own);
    }
    Ok(serde_json::from_value(Value::Object(config))?)
}

fn vb(weights: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(weights, DType::F32, &Device::Cpu)
}

fn gemma(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: gemma::Config = config(use_flash_attn, json!({}))?;
    let mut model = gemma::Model::new(use_flash_attn, &config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// Without `attn_logit_softcapping`, which the model does not pass to flash-attn: with it the stock model would differ.
fn gemma2(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32});
    let config: gemma2::Config = config(use_flash_attn, own)?;
    let mut model = gemma2::Model::new(use_flash_attn, &config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// Layer 0 has a window, layer 1 has none; both make the same call. Without `attn_logit_softcapping`, as gemma2. One KV
/// head, because the stock model fails with more, with and without flash-attn: in layers without a window it appends
/// values to its cache that are not contiguous (<https://github.com/huggingface/candle/pull/3902>).
fn gemma3(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({
        "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2
    });
    let config: gemma3::Config = config(use_flash_attn, own)?;
    let mut model = gemma3::Model::new(use_flash_attn, &config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// A layer with a window and one without, which has a head size of its own; both make the same call. The default for
/// the second, 512, is too large for sparse calls.
fn gemma4(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let layer_types = ["sliding_attention", "full_attention"];
    let own = json!({"layer_types": layer_types, "global_head_dim": 64, "num_global_key_value_heads": 1});
    let config: gemma4::Gemma4TextConfig = config(use_flash_attn, own)?;
    let mut model = gemma4::text::TextModel::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

fn granite(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: granite::GraniteConfig = config(use_flash_attn, json!({}))?;
    let config = config.into_config(use_flash_attn);
    let model = granite::Granite::load(vb(weights), &config)?;
    let mut cache = granite::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position, &mut cache))
}

/// Attention layers only, because the stock model refuses mamba layers. `attention_multiplier` is the softmax scale.
fn granitemoehybrid(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({"attention_multiplier": 0.176_776_7});
    let config: granitemoehybrid::GraniteMoeHybridConfig = config(use_flash_attn, own)?;
    let config = config.into_config(use_flash_attn);
    let model = granitemoehybrid::GraniteMoeHybrid::load(vb(weights), &config)?;
    let mut cache = granitemoehybrid::GraniteMoeHybridCache::new(true, DType::F32, &config, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position, &mut cache))
}

fn helium(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: helium::Config = config(use_flash_attn, json!({}))?;
    let mut model = helium::Model::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// Layer 0 is a convolution, so only layer 1 has attention.
fn lfm2(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    // The model would start it at 0, which makes the layer's output 0.
    let kernel = "model.layers.0.conv.conv.weight";
    weights.get((128, 1, 3), kernel, DEFAULT_KAIMING_NORMAL, DType::F32, &Device::Cpu)?;
    let own = json!({"layer_types": ["conv", "full_attention"], "conv_l_cache": 3});
    let config: lfm2::Lfm2Config = config(use_flash_attn, own)?;
    let config = config.into_config(use_flash_attn);
    let model = lfm2::Model::new(&config, vb(weights))?;
    let mut cache = lfm2::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position, &mut cache))
}

fn llama(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: llama::LlamaConfig = config(use_flash_attn, json!({}))?;
    let config = config.into_config(use_flash_attn);
    let model = llama::Llama::load(vb(weights), &config)?;
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position, &mut cache))
}

fn mistral(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: mistral::Config = config(use_flash_attn, json!({}))?;
    let mut model = mistral::Model::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// Every token uses both experts: a choice that depends on rounding would make the logits differ by chance.
fn mixtral(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({"num_local_experts": 2, "num_experts_per_tok": 2});
    let config: mixtral::Config = config(use_flash_attn, own)?;
    let mut model = mixtral::Model::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// The model reads only GGUF, so the weights go through a file in memory, in f32.
fn quantized_phi3(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let sizes = [
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("block_count", 2),
        ("embedding_length", 128),
        ("context_length", 1024),
        ("feed_forward_length", 256),
        ("rope.dimension_count", 32),
    ];
    let mut metadata = Vec::from(sizes.map(|(name, size)| (format!("phi3.{name}"), gguf_file::Value::U32(size))));
    metadata.push(("phi3.attention.layer_norm_rms_epsilon".to_owned(), gguf_file::Value::F32(1e-5)));

    let outer = [("token_embd", vec![64, 128]), ("output_norm", vec![128]), ("output", vec![64, 128])];
    let mut shapes = Vec::from(outer.map(|(name, shape)| (name.to_owned(), shape)));
    for layer in 0..2 {
        let block = [
            ("attn_norm", vec![128]),
            ("attn_qkv", vec![(4 + 2 * 2) * 32, 128]),
            ("attn_output", vec![128, 128]),
            ("ffn_norm", vec![128]),
            ("ffn_up", vec![2 * 256, 128]),
            ("ffn_down", vec![128, 256]),
        ];
        shapes.extend(block.map(|(name, shape)| (format!("blk.{layer}.{name}"), shape)));
    }
    let tensor = |(name, shape): (String, Vec<usize>)| -> Result<(String, QTensor)> {
        let name = format!("{name}.weight");
        let init = if shape.len() == 1 { ONE } else { DEFAULT_KAIMING_NORMAL };
        let weight = weights.get(shape, &name, init, DType::F32, &Device::Cpu)?;
        Ok((name, QTensor::quantize(&weight, GgmlDType::F32)?))
    };
    let tensors = shapes.into_iter().map(tensor).collect::<Result<Vec<_>>>()?;

    let mut file = Cursor::new(Vec::<u8>::new());
    gguf_file::write(&mut file, &borrowed(&metadata), &borrowed(&tensors))?;
    file.set_position(0);
    let content = gguf_file::Content::read(&mut file)?;
    let mut model = quantized_phi3::ModelWeights::from_gguf(use_flash_attn, content, &mut file, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position))
}

fn borrowed<T>(pairs: &[(String, T)]) -> Vec<(&str, &T)> {
    pairs.iter().map(|(name, value)| (name.as_str(), value)).collect()
}

/// It has no switch: built with flash-attn it calls it on a GPU, and never on the CPU. So all three runs are the same.
fn qwen3(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({"max_window_layers": 2, "use_sliding_window": false});
    let config: qwen3::Config = config(use_flash_attn, own)?;
    let mut model = qwen3::ModelForCausalLM::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

fn stable_lm(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let own = json!({"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "use_cache": true});
    let config: stable_lm::Config = config(use_flash_attn, own)?;
    let mut model = stable_lm::Model::new(&config, vb(weights))?;
    logits(|ids, position| model.forward(ids, position))
}

/// The text decoder of Voxtral, without audio.
fn voxtral(use_flash_attn: bool, weights: &VarMap) -> Result<[Tensor; 2]> {
    let config: voxtral::VoxtralLlamaConfig = config(use_flash_attn, json!({}))?;
    let model = voxtral::VoxtralLlama::load(vb(weights), &config)?;
    let mut cache = voxtral::VoxtralLlamaCache::new(true, DType::F32, &config, &Device::Cpu)?;
    logits(|ids, position| model.forward(ids, position, &mut cache))
}
