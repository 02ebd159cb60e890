//! Greedy decoding: the likeliest token chosen on the GPU, and streams that decode it before the host has read it.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_s2o::Dense;
use s2o_models::fused::Likeliest;
use s2o_models::weights::synthetic;
use s2o_models::{
    Decoder, DecoderConfig, GenerationOptions, KvCache, KvStorage, ModelError, PrefillOptions, StopReason, TokenStream,
};
use s2o_testkit::noise;

use crate::Runner;
use crate::decoder::{llama, load, qwen3, tokens, values};

const PROMPT: usize = 300;
const NEW: usize = 12;

fn choice(device: &Device, logits: &[f32]) -> (u32, Option<u32>) {
    let logits = Tensor::new(logits, device).unwrap();
    let mut likeliest = Likeliest::new(device).unwrap();
    let on_gpu = likeliest.choose(&logits).unwrap();
    assert_eq!(on_gpu.dims(), [1, 1]);
    (on_gpu.reshape(()).unwrap().to_scalar().unwrap(), likeliest.read().unwrap())
}

pub fn cases(runner: &mut Runner) {
    for size in [1, 2, 31, 33, 1000, 1024, 1025, 33_000, 128_256] {
        runner.case(&format!("greedy choice of {size}"), |runner| {
            let device = &runner.device;
            let low: Vec<f32> = noise(size, 3).into_iter().map(|x| x - 100.0).collect();
            // Places of one thread, of neighbours, of a warp and of different warps.
            let mut places = vec![0, 1, 5, 31, 32, 1023, 1024, 1029, 5 + 8 * 1024, 40_000, size / 2, size - 1];
            places.retain(|place| *place < size);
            for &first in &places {
                for &second in &places {
                    let mut logits = low.clone();
                    (logits[first], logits[second]) = (-1.0, -1.0);
                    let place = first.min(second) as u32;
                    assert_eq!(choice(device, &logits), (place, Some(place)), "{first} and {second}");
                }
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut logits = low.clone();
                    logits[first] = wrong;
                    let (on_gpu, read) = choice(device, &logits);
                    assert!((on_gpu as usize) < size && read.is_none(), "{wrong} at {first}: {on_gpu}, {read:?}");
                }
            }
            assert_eq!(choice(device, &vec![f32::NAN; size]), (0, None));
            assert_eq!(choice(device, &vec![f32::NEG_INFINITY; size]), (0, None));
        });
    }
    runner.case("greedy choices one after the other, and of a row", |runner| {
        let rows = Tensor::new(&[[0.0f32, 3.0, 1.0], [5.0, 4.0, 1.0]], &runner.device).unwrap();
        let mut likeliest = Likeliest::new(&runner.device).unwrap();
        assert_eq!(likeliest.read().unwrap(), None, "no choice yet");
        let kept: Vec<Tensor> = (0..2)
            .map(|row| {
                let token = likeliest.choose(&rows.get(row).unwrap()).unwrap();
                assert_eq!(likeliest.read().unwrap(), Some([1, 0][row]));
                token
            })
            .collect();
        assert_eq!(kept.iter().map(|token| token.to_vec2::<u32>().unwrap()[0][0]).collect::<Vec<_>>(), [1, 0]);
        let half = rows.get(0).unwrap().to_dtype(DType::BF16).unwrap();
        for wrong in [rows.clone(), rows.get_on_dim(1, 0).unwrap(), half, rows.get(0).unwrap().narrow(0, 0, 0).unwrap()]
        {
            let error = likeliest.choose(&wrong).unwrap_err().to_string();
            assert!(error.contains("expected contiguous f32 logits of one position, got "), "{error}");
        }
        assert!(Likeliest::new(&Device::Cpu).is_err());
    });
    runner.case("greedy stream of logits that are not finite", |runner| not_finite(&runner.device));
    for (name, json, dtype) in [("llama", llama(), DType::BF16), ("qwen3", qwen3(), DType::F16)] {
        for storage in [KvStorage::AsComputed, KvStorage::Int8, KvStorage::Host] {
            runner.case(&format!("greedy stream {name}, {storage:?}"), |runner| {
                stream(&load(&json, dtype, &runner.device), storage);
            });
        }
    }
}

/// A token whose embedding is NaN ends the stream after it.
fn not_finite(device: &Device) {
    let config = DecoderConfig::from_json(&llama().to_string(), "test").unwrap();
    let mut weights = synthetic::weights(&config, 5, &Device::Cpu).unwrap();
    let ids = [3u32, 1, 4, 1, 5];
    let prompt = Tensor::new(&[ids], device).unwrap();
    let mut first = None;
    for is_poisoned in [false, true] {
        if let Some(first) = first.filter(|_| is_poisoned) {
            assert!(!ids.contains(&first));
            let rows = weights.get_mut("model.embed_tokens.weight").unwrap();
            let is_first: Vec<f32> = (0..288).map(|id| if id == first { f32::NAN } else { 0.0 }).collect();
            let add = Tensor::from_vec(is_first, (288, 1), &Device::Cpu).unwrap().to_dtype(rows.dtype()).unwrap();
            *rows = rows.broadcast_add(&add).unwrap();
        }
        let vb = VarBuilder::from_tensors(weights.clone(), DType::BF16, device);
        let decoder = Decoder::load(&config, &vb, None).unwrap();
        let mut cache = decoder.new_cache(1, 20).unwrap();
        let out = decoder.prefill(&prompt, &mut cache, &Dense, PrefillOptions::new()).unwrap();
        let options = GenerationOptions { max_new_tokens: 4, ..GenerationOptions::default() };
        let mut stream =
            TokenStream::new(&decoder, &mut cache, &out.last_logits().unwrap(), &[], &[], &options).unwrap();
        let token = stream.next().unwrap().unwrap();
        assert_eq!(*first.get_or_insert(token), token);
        let next = stream.next().unwrap();
        match next {
            Err(ModelError::NotFinite { layer: Some(0), .. }) if is_poisoned => assert!(stream.next().is_none()),
            Ok(_) if !is_poisoned => {}
            other => panic!("poisoned {is_poisoned}: {other:?}"),
        }
    }
}

/// A prompt in a cache with room for `room` more tokens, and its logits.
fn prefilled(decoder: &Decoder, storage: KvStorage, room: usize) -> (KvCache, Tensor) {
    let mut cache = decoder.new_cache_in(storage, 1, PROMPT + room).unwrap();
    let prompt = tokens(1, PROMPT, decoder.device());
    let out = decoder.prefill(&prompt, &mut cache, &Dense, PrefillOptions::new()).unwrap();
    (cache, out.last_logits().unwrap())
}

/// Tokens by hand, the host choosing each of them, and the logits after the last.
fn by_hand(decoder: &Decoder, storage: KvStorage) -> (Vec<u32>, Vec<f32>) {
    let (mut cache, logits) = prefilled(decoder, storage, NEW);
    let mut logits = values(&logits);
    let mut chosen = Vec::new();
    for _ in 0..NEW {
        let first = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        chosen.push(first as u32);
        logits = values(&decoder.decode_ids(&[first as u32], &mut cache).unwrap());
    }
    (chosen, logits)
}

fn stream(decoder: &Decoder, storage: KvStorage) {
    let (want, after) = by_hand(decoder, storage);
    let options = GenerationOptions { max_new_tokens: NEW, ..GenerationOptions::default() };
    let run = |cache: &mut KvCache, logits: &Tensor, eos: &[u32], taken: usize| {
        let mut stream = TokenStream::new(decoder, cache, logits, &[], eos, &options).unwrap();
        let chosen: Vec<u32> = stream.by_ref().take(taken).map(|token| token.unwrap()).collect();
        (chosen, stream.stop_reason())
    };
    // The whole stream; the last token is not in the cache.
    let (mut cache, logits) = prefilled(decoder, storage, NEW);
    assert_eq!(run(&mut cache, &logits, &[], usize::MAX), (want.clone(), Some(StopReason::Length)));
    assert_eq!(cache.len(), PROMPT + NEW - 1);
    assert!(values(&decoder.decode_ids(&[want[NEW - 1]], &mut cache).unwrap()) == after, "after the stream");

    // Dropped after some tokens: the last one was decoded ahead, and its position is not counted.
    let taken = 5;
    let rows = |cache: &KvCache| -> Vec<f32> {
        let layers =
            (0..decoder.config().num_layers).flat_map(|layer| <[Tensor; 2]>::from(cache.layer(layer).unwrap()));
        layers.flat_map(|side| values(&side.to_dtype(DType::F32).unwrap())).collect()
    };
    let (mut by_hand, _) = prefilled(decoder, storage, NEW);
    for token in &want[..taken] {
        decoder.decode_ids(&[*token], &mut by_hand).unwrap();
    }
    let (mut cache, logits) = prefilled(decoder, storage, NEW);
    assert_eq!(run(&mut cache, &logits, &[], taken), (want[..taken].to_vec(), None));
    assert_eq!(cache.len(), PROMPT + taken - 1);
    cache.set_len(PROMPT + taken).unwrap();
    assert!(rows(&cache) == rows(&by_hand), "the last token was not decoded ahead");
    // Whatever comes next, it leaves no trace.
    cache.truncate(PROMPT + taken - 1);
    decoder.decode_ids(&[(want[taken - 1] + 1) % 288], &mut cache).unwrap();
    cache.truncate(PROMPT + taken - 1);
    let mut logits = Vec::new();
    for token in &want[taken - 1..] {
        logits = values(&decoder.decode_ids(&[*token], &mut cache).unwrap());
    }
    assert!(logits == after, "after a dropped stream");

    // Ended by an end token.
    let (mut cache, logits) = prefilled(decoder, storage, NEW);
    let end = (3..NEW - 1).find(|&i| !want[..i].contains(&want[i])).expect("a new token after the third");
    assert_eq!(run(&mut cache, &logits, &[want[end]], usize::MAX), (want[..end].to_vec(), Some(StopReason::Eos)));
    assert_eq!(cache.len(), PROMPT + end);

    // In a cache that is too short, as many tokens as fit and one more, then the error.
    let (mut cache, logits) = prefilled(decoder, storage, 3);
    let mut stream = TokenStream::new(decoder, &mut cache, &logits, &[], &[], &options).unwrap();
    let fitting: Vec<u32> = stream.by_ref().take(4).map(|token| token.unwrap()).collect();
    assert_eq!(fitting, want[..4]);
    let error = stream.next().unwrap().unwrap_err().to_string();
    assert!(error.contains("KV cache"), "{error}");
    assert!(stream.next().is_none());

    // Logits of the prompt that are not finite.
    let (mut cache, logits) = prefilled(decoder, storage, NEW);
    let error = TokenStream::new(decoder, &mut cache, &(logits * f64::NAN).unwrap(), &[], &[], &options).err().unwrap();
    assert!(error.to_string().contains("finite"), "{error}");
}
