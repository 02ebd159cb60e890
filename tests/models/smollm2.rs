//! SmolLM2-135M from a real GGUF file. `scripts/fetch-smollm2.sh` fetches it; `S2O_SMOLLM2` names it.

use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use candle_transformers::models::quantized_llama::ModelWeights;
use s2o_models::{GenerationOptions, LoadOptions, LoadedModel, ModelSource, PrefillOptions, TextStream, passkey};

use crate::fixtures::{last_logits, max_abs, max_diff};

fn path() -> std::ffi::OsString {
    std::env::var_os("S2O_SMOLLM2").expect("S2O_SMOLLM2: expected the path that scripts/fetch-smollm2.sh prints")
}

fn load() -> LoadedModel {
    let source: ModelSource = path().to_str().unwrap().parse().unwrap();
    source.load(&LoadOptions::default(), None).unwrap()
}

#[test]
#[ignore = "needs a model file: S2O_SMOLLM2=$(scripts/fetch-smollm2.sh) cargo test --release -- --include-ignored"]
fn s2o_keeps_the_perplexity() {
    let model = load();
    let (len, last) = (4096, 512);
    let tokens = model.encode(&passkey::haystack().unwrap()[..40_000]).unwrap()[..len].to_vec();
    let perplexity = |method: &dyn Attention| {
        let mut cache = model.decoder.new_cache(1, len).unwrap();
        let options = PrefillOptions::new().num_logits(last).chunk(1500);
        let prompt = model.prompt(&tokens[..len - 1]).unwrap();
        let logits = model.decoder.prefill(&prompt, &mut cache, method, options).unwrap().logits.squeeze(0).unwrap();
        let targets = Tensor::new(&tokens[len - last..], &Device::Cpu).unwrap().unsqueeze(1).unwrap();
        let picked = candle_nn::ops::log_softmax(&logits, 1).unwrap().gather(&targets, 1).unwrap();
        (-picked.mean_all().unwrap().to_scalar::<f32>().unwrap()).exp()
    };
    let dense = perplexity(&Dense);
    // Without the dense tail, which would cover part of the measured text.
    let s2o = S2o::new(S2oConfig::builder().dense_tail(0).build().unwrap()).with_stats();
    let sparse = perplexity(&s2o);
    let density = AttnStats::joint_density(s2o.take_stats().unwrap().values());
    println!("perplexity {dense:.3} dense, {sparse:.3} S2O at density {density:.3}");
    assert!(density < 0.95, "{density}");
    assert!((sparse / dense - 1.0).abs() < 0.02, "{dense} {sparse}");
}

#[test]
#[ignore = "needs a model file: S2O_SMOLLM2=$(scripts/fetch-smollm2.sh) cargo test --release -- --include-ignored"]
fn completes_a_sentence() {
    let path = path();
    let model = load();
    assert_eq!(model.num_parameters(), 134_515_008);

    // As the model's own tokenizer.json encodes them.
    let known: [(&str, &[u32]); 3] = [
        ("The capital of France is", &[504, 3575, 282, 4649, 314]),
        ("2024", &[34, 32, 34, 36]),
        ("<|im_start|>user\n", &[1, 4093, 198]),
    ];
    for (text, expected) in known {
        assert_eq!(model.encode(text).unwrap(), expected, "{text:?}");
    }
    for text in ["  leading", "tabs\tand\n\nlines  ", "naïve café 日本語 🦀🎉", "x=12345; y = {6}", "it's they'll", ""]
    {
        let ids = model.encode(text).unwrap();
        assert_eq!(model.decode_text(&ids).unwrap(), text);
        let mut stream = TextStream::new(&model.tokenizer);
        let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert!(!streamed.contains('\u{fffd}'), "half a character came out of {text:?}");
        streamed.push_str(&stream.finish().unwrap());
        assert_eq!(streamed, text);
    }

    let prompt = model.encode("The capital of France is").unwrap();
    same_as_candles_quantised_llama(&model, path.as_ref(), &prompt);
    let mut cache = model.decoder.new_cache(1, 64).unwrap();
    let options = GenerationOptions { max_new_tokens: 12, ..Default::default() };
    let prefill = PrefillOptions::new();
    let out = model.generate(&prompt, &mut cache, &Dense, prefill, &options, &mut |_| ()).unwrap();
    println!("The capital of France is{}", out.text);
    assert!(out.text.contains("Paris"), "{:?}", out.text);
}

/// Candle multiplies the quantised weights with quantised activations, so its logits agree only approximately.
fn same_as_candles_quantised_llama(model: &LoadedModel, path: &Path, prompt: &[u32]) {
    let tokens = model.prompt(prompt).unwrap();
    let ours = last_logits(&model.decoder, &tokens);
    let mut file = std::fs::File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut candle = ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    let theirs = candle.forward(&tokens, 0).unwrap();
    let (difference, scale) = (max_diff(&ours, &theirs), max_abs(&theirs));
    println!("largest difference to candle's quantised llama: {difference}, logits up to {scale}");
    assert!(difference < 0.1 * scale);
}
