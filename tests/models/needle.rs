//! The embedded model equals Candle's qwen3 and finds the needles that it was trained to find.

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use candle_transformers::models::qwen3;
use s2o_eval::tasks;
use s2o_models::{GenerationOptions, LoadOptions, LoadedModel, ModelSource, PrefillOptions, passkey};

use crate::fixtures::*;

fn needle() -> LoadedModel {
    let source: ModelSource = "needle-11m".parse().unwrap();
    let mut layers = Vec::new();
    let model = source.load(&LoadOptions::default(), Some(&mut |done, total| layers.push((done, total)))).unwrap();
    assert_eq!(layers, (1..=10).map(|layer| (layer, 10)).collect::<Vec<_>>());
    model
}

fn assert_answers(model: &LoadedModel, tokens: &[u32], expected: &str) {
    assert_answers_with(model, tokens, expected, &Dense, 512);
}

fn assert_answers_with(model: &LoadedModel, tokens: &[u32], expected: &str, method: &dyn Attention, chunk: usize) {
    let mut cache = model.decoder.new_cache(1, tokens.len() + 16).unwrap();
    let options = GenerationOptions { max_new_tokens: 12, ..Default::default() };
    let mut streamed = String::new();
    let mut show = |text: &str| streamed.push_str(text);
    let prefill = PrefillOptions::new().chunk(chunk);
    let out = model.generate(tokens, &mut cache, method, prefill, &options, &mut show).unwrap();
    assert_eq!(out.text, model.decode_text(&out.tokens).unwrap());
    assert_eq!(out.text, streamed);
    assert!(passkey::answers_exactly(&out.text, expected), "chunk {chunk}: {:?}, expected {expected}", out.text);
}

#[test]
fn s2o_finds_the_needles() {
    let model = needle();
    let records = passkey::records().unwrap();
    for record in records.iter().filter(|record| record.tokens < 5000).step_by(5) {
        let tokens = model.encode(&record.input).unwrap();
        let s2o = S2o::new(S2oConfig::default()).with_stats();
        // Whole, in chunks that cut segments, and with a last chunk much shorter than the dense tail.
        for chunk in [tokens.len(), 1000, tokens.len() - 9] {
            assert_answers_with(&model, &tokens, &record.answer, &s2o, chunk);
            let density = AttnStats::joint_density(s2o.take_stats().unwrap().values());
            assert!(density < 0.85, "chunk {chunk}: density {density}");
        }
    }
}

#[test]
fn what_it_is() {
    let model = needle();
    assert_eq!(model.num_parameters(), 10_886_912);
    assert_eq!(model.eos_ids, [1]);
    assert_eq!(model.config().max_positions, 131_072);
    assert_eq!(model.encode("a").unwrap()[0], 0, "<|bos|> goes in front");
    assert_eq!(model.encode("2024").unwrap().len(), 5, "every digit is a token");
}

#[test]
fn logits_equal_candles_on_2k_tokens() {
    let model = needle();
    let text = &passkey::records().unwrap()[0].input;
    let tokens = model.prompt(&model.encode(text).unwrap()[..2048]).unwrap();
    let mut cache = model.decoder.new_cache(1, 2048).unwrap();
    let options = PrefillOptions::new().chunk(600);
    let ours = model.decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap().last_logits().unwrap();

    let config: qwen3::Config = serde_json::from_str(s2o_needle_11m::CONFIG).unwrap();
    let vb = VarBuilder::from_buffered_safetensors(s2o_needle_11m::safetensors(), DType::F32, &Device::Cpu).unwrap();
    let mut theirs = qwen3::ModelForCausalLM::new(&config, vb).unwrap();
    let theirs = theirs.forward(&tokens, 0).unwrap().squeeze(1).unwrap();
    let (difference, scale) = (max_diff(&ours, &theirs), max_abs(&theirs));
    assert!(difference < 1e-4 * scale, "{difference} at logits up to {scale}");
}

#[test]
fn answers_an_embedded_4k_passkey() {
    let model = needle();
    let records = passkey::records().unwrap();
    assert_eq!(records.len(), 30);
    let record = records.iter().find(|record| record.kind == "passkey").unwrap();
    let tokens = model.encode(&record.input).unwrap();
    assert_eq!(tokens.len(), record.tokens);
    assert_answers(&model, &tokens, &record.answer);
}

#[test]
fn answers_a_built_passkey() {
    let model = needle();
    let prompt = tasks::passkey::build(&model.tokenizer, 3000, 0.3, 11).unwrap();
    assert_answers(&model, &prompt.tokens, &prompt.answer);
}

#[test]
fn answers_one_of_sixteen_keys() {
    let model = needle();
    let prompt = tasks::passkey::build_keyed(&model.tokenizer, 3000, 16, 5).unwrap();
    assert!(prompt.tokens.len() <= 3000 && prompt.tokens.len() > 2936);
    let needles: Vec<&str> =
        prompt.text.lines().filter(|line| line.starts_with("The special magic number for ")).collect();
    assert_eq!(needles.len(), 16);
    let asked = needles.iter().filter(|line| line.ends_with(&format!(" is: {}.", prompt.answer)));
    assert_eq!(asked.count(), 1);
    assert_answers(&model, &prompt.tokens, &prompt.answer);
    assert!(tasks::passkey::build_keyed(&model.tokenizer, 3000, 0, 5).is_err());
}

#[test]
fn built_prompts_have_the_wanted_length_and_depth() {
    let model = needle();
    for (num_tokens, depth, seed) in
        [(100, 0.5, 0), (512, 0.0, 1), (4096, 0.25, 2), (4096, 1.0, 3), (32_768, 0.5, 4), (131_072, 0.9, 5)]
    {
        let prompt = tasks::passkey::build(&model.tokenizer, num_tokens, depth, seed).unwrap();
        assert!(prompt.tokens.len() <= num_tokens && prompt.tokens.len() > num_tokens - 64, "{num_tokens}");
        assert_eq!(prompt.tokens, model.encode(&prompt.text).unwrap());
        let needle = format!("\nThe pass key is {0}. Remember it. {0} is the pass key.\n", prompt.answer);
        assert_eq!(prompt.text.matches("pass key is").count(), 2, "one needle, one question");
        let at = prompt.text.find(&needle).unwrap();
        if num_tokens >= 4096 {
            let place = at as f64 / (prompt.text.len() - needle.len()) as f64;
            assert!((place - depth).abs() < 0.05, "wanted {depth}, got {place}");
        }
        assert_eq!((prompt.answer.len(), prompt.answer.starts_with('0')), (7, false));
    }
    let again = |seed| tasks::passkey::build(&model.tokenizer, 600, 0.5, seed).unwrap();
    assert_eq!(again(1), again(1));
    assert_ne!(again(1).answer, again(2).answer);
    // Another kind of tokenizer, with many more tokens for the same text.
    let tiny = tiny_tokenizer();
    let prompt = tasks::passkey::build(&tiny, 5000, 0.5, 0).unwrap();
    assert!(prompt.tokens.len() <= 5000 && prompt.tokens.len() > 4936);
}
