//! Sampled generations against `candle_transformers`: equal tokens for equal seeds.

use candle_core::Tensor;
use candle_s2o::Dense;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candle_transformers::utils::apply_repeat_penalty;
use s2o_models::{Decoder, GenerationOptions, KvCache, PrefillOptions, TokenStream};

use crate::fixtures::*;

const NEW_TOKENS: usize = 12;

/// The cache and the logits after a prompt, and its tokens.
fn prefilled(decoder: &Decoder) -> (KvCache, Tensor, Vec<u32>) {
    let prompt = tokens(1, 20, 288);
    let mut cache = decoder.new_cache(1, 20 + NEW_TOKENS).unwrap();
    let logits = decoder.prefill(&prompt, &mut cache, &Dense, PrefillOptions::new()).unwrap().last_logits().unwrap();
    (cache, logits, prompt.flatten_all().unwrap().to_vec1().unwrap())
}

fn ours(decoder: &Decoder, options: &GenerationOptions) -> Vec<u32> {
    let (mut cache, logits, prompt) = prefilled(decoder);
    let stream = TokenStream::new(decoder, &mut cache, &logits, &prompt, &[], options).unwrap();
    stream.map(Result::unwrap).collect()
}

/// The loop of Candle's examples.
fn theirs(decoder: &Decoder, options: &GenerationOptions, sampling: Sampling) -> Vec<u32> {
    let (mut cache, mut logits, mut context) = prefilled(decoder);
    let mut processor = LogitsProcessor::from_sampling(options.seed, sampling);
    for _ in 0..NEW_TOKENS {
        let recent = &context[context.len().saturating_sub(options.repeat_last_n)..];
        let penalised = apply_repeat_penalty(&logits.squeeze(0).unwrap(), options.repeat_penalty, recent).unwrap();
        let token = processor.sample(&penalised).unwrap();
        context.push(token);
        logits = decoder.decode(&Tensor::new(&[[token]], decoder.device()).unwrap(), &mut cache).unwrap();
    }
    context.split_off(context.len() - NEW_TOKENS)
}

#[test]
fn tokens_are_candles_for_the_same_seed() {
    let decoder = decoder(&llama_json(), 23);
    let k = 40;
    for (temperature, p) in [(0.05, 0.4), (0.7, 0.9), (1.5, 0.99)] {
        for (top_k, top_p, sampling) in [
            (None, None, Sampling::All { temperature }),
            (None, Some(1.0), Sampling::TopP { p: 1.0, temperature }),
            (None, Some(p), Sampling::TopP { p, temperature }),
            (Some(k), None, Sampling::TopK { k, temperature }),
            (Some(1000), None, Sampling::TopK { k: 1000, temperature }),
            (Some(k), Some(p), Sampling::TopKThenTopP { k, p, temperature }),
        ] {
            for (seed, repeat_penalty, repeat_last_n) in [(0, 1.0, 64), (1, 1.3, 64), (2, 1.3, 3), (3, 0.8, 0)] {
                let temperature = Some(temperature);
                let options = GenerationOptions {
                    max_new_tokens: NEW_TOKENS,
                    temperature,
                    top_k,
                    top_p,
                    seed,
                    repeat_penalty,
                    repeat_last_n,
                };
                let (ours, theirs) = (ours(&decoder, &options), theirs(&decoder, &options, sampling.clone()));
                assert_eq!(ours, theirs, "{options:?}");
            }
        }
    }
}

#[test]
fn the_likeliest_tokens_are_candles() {
    let decoder = decoder(&llama_json(), 24);
    for temperature in [None, Some(0.0), Some(1e-8)] {
        for repeat_penalty in [1.0, 1.5] {
            let options =
                GenerationOptions { max_new_tokens: NEW_TOKENS, temperature, repeat_penalty, ..Default::default() };
            assert_eq!(ours(&decoder, &options), theirs(&decoder, &options, Sampling::ArgMax), "{options:?}");
        }
    }
}
