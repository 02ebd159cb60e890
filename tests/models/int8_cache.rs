//! A KV cache in 8 bits: as independent of chunks, batches and decoding as one in the dtype of the model, and near it.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{Dense, S2o, S2oConfig};
use s2o_models::decoder::DecoderOptions;
use s2o_models::{Decoder, KvCache, KvStorage, LoadOptions, ModelSource, PrefillOptions, passkey};
use s2o_testkit::relative_l2;
use serde_json::Value;

use crate::fixtures::*;

/// Sums in another order change an entry before it is rounded, and then at times its code.
const TOLERANCE: f32 = 2e-3;

fn int8_decoder(json: &Value, seed: u64) -> Decoder {
    let options = DecoderOptions { kv: KvStorage::Int8, ..DecoderOptions::default() };
    Decoder::load_with(&config(json), &builder(&weights(json, seed)), options, None).unwrap()
}

fn logits(decoder: &Decoder, tokens: &Tensor, cache: &mut KvCache, chunk: Option<usize>) -> Tensor {
    cache.reset();
    let options = PrefillOptions::new().chunk(chunk).num_logits(20);
    decoder.prefill(tokens, cache, &Dense, options).unwrap().logits
}

#[test]
fn any_chunking_equals_the_whole_and_is_near_the_wide_cache() {
    for json in both() {
        let decoder = int8_decoder(&json, 1);
        assert_eq!(decoder.precision(), "f32, KV cache in 8 bits");
        for batch in [1, 2] {
            let tokens = tokens(batch, 67, 288);
            let mut cache = decoder.new_cache(batch, 70).unwrap();
            let whole = logits(&decoder, &tokens, &mut cache, None);
            let off = |x: &Tensor| relative_l2(&values(x), &values(&whole));
            for chunk in [1, 7, 33, 66] {
                let difference = off(&logits(&decoder, &tokens, &mut cache, Some(chunk)));
                assert!(difference < 2e-3, "chunk {chunk}: {difference}");
            }
            let mut wide = decoder.new_cache_in(KvStorage::AsComputed, batch, 70).unwrap();
            let error = off(&logits(&decoder, &tokens, &mut wide, None));
            assert!(error > 5e-3 && error < 0.02, "{error}");
        }
    }
}

#[test]
fn decoding_equals_a_longer_prefill() {
    for json in both() {
        let decoder = int8_decoder(&json, 2);
        let tokens = tokens(2, 40, 288);
        let mut cache = decoder.new_cache(2, 40).unwrap();
        let whole = logits(&decoder, &tokens, &mut cache, None);
        cache.reset();
        let head = tokens.narrow(1, 0, 30).unwrap();
        decoder.prefill(&head, &mut cache, &Dense, PrefillOptions::new().chunk(11)).unwrap();
        for position in 30..40 {
            let step = decoder.decode(&tokens.narrow(1, position, 1).unwrap(), &mut cache).unwrap();
            let expected = whole.narrow(1, position - 20, 1).unwrap().squeeze(1).unwrap();
            let difference = max_diff(&step, &expected);
            assert!(difference < TOLERANCE, "position {position}: {difference}");
        }
    }
}

#[test]
fn sequences_prefilled_alone_decode_together() {
    let decoder = int8_decoder(&llama_json(), 3);
    let tokens = tokens(3, 40, 288);
    let prompt = tokens.narrow(1, 0, 39).unwrap();
    let last = tokens.narrow(1, 39, 1).unwrap();
    let mut whole = decoder.new_cache(3, 40).unwrap();
    decoder.prefill(&prompt, &mut whole, &Dense, PrefillOptions::new()).unwrap();
    let expected = decoder.decode(&last, &mut whole).unwrap();
    let mut cache = decoder.new_cache(3, 40).unwrap();
    for i in [2, 0, 1] {
        let mut own = cache.sequences(i..i + 1).unwrap();
        decoder.prefill(&prompt.narrow(0, i, 1).unwrap(), &mut own, &Dense, PrefillOptions::new()).unwrap();
    }
    cache.set_len(39).unwrap();
    let together = decoder.decode(&last, &mut cache).unwrap();
    assert!(max_diff(&together, &expected) < TOLERANCE);
}

#[test]
fn layers_are_what_attention_read_and_stay() {
    let decoder = int8_decoder(&qwen3_json(), 4);
    let tokens = tokens(1, 30, 288);
    let prefill = |kv| {
        let mut cache = decoder.new_cache_in(kv, 1, 32).unwrap();
        decoder.prefill(&tokens, &mut cache, &Dense, PrefillOptions::new().chunk(13)).unwrap();
        cache
    };
    let (narrow, wide) = (prefill(KvStorage::Int8), prefill(KvStorage::AsComputed));
    let (k, v) = narrow.layer(0).unwrap();
    let (k_wide, v_wide) = wide.layer(0).unwrap();
    let other = narrow.layer(1).unwrap().0;
    for (got, wide) in [(&k, &k_wide), (&v, &v_wide)] {
        assert_eq!(got.dims(), wide.dims());
        let head_dim = got.dim(3).unwrap();
        for (got, wide) in values(got).chunks(head_dim).zip(values(wide).chunks(head_dim)) {
            let most = wide.iter().fold(0f32, |most, x| most.max(x.abs()));
            let worst = got.iter().zip(wide).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst <= most / 253.0 && worst > 0.0, "off by {worst} in a row up to {most}");
        }
    }
    assert!(max_diff(&k, &other) > 0.1, "reading a layer changed another");
}

#[test]
fn takes_the_memory_that_it_says() {
    let decoder = int8_decoder(&llama_json(), 5);
    let config = decoder.config();
    let rows = 2 * 3 * 50 * config.num_kv_heads;
    // A byte for each entry and a scale of 4 for each row of every layer, and one layer in f32.
    let expected = config.num_layers * rows * (config.head_dim + 4) + rows * config.head_dim * 4;
    assert_eq!(decoder.cache_bytes(3, 50), expected as u64);
    let bytes = KvCache::bytes(config, 3, 50, DType::F32, KvStorage::AsComputed);
    assert_eq!(bytes, (config.num_layers * rows * config.head_dim * 4) as u64);
}

#[test]
fn a_cache_in_host_memory_is_for_gpus() {
    let decoder = int8_decoder(&llama_json(), 5);
    let error = decoder.new_cache_in(KvStorage::Host, 1, 50).unwrap_err().to_string();
    assert!(error.contains("device of a KV cache in host memory: expected an NVIDIA GPU, got the CPU"), "{error}");
    // Two layers of keys and values on the device.
    let config = decoder.config();
    let layer = 2 * 50 * config.num_kv_heads * config.head_dim * 2;
    assert_eq!(KvCache::bytes(config, 1, 50, DType::BF16, KvStorage::Host), (2 * layer) as u64);
}

#[test]
fn finds_a_passkey() {
    let options = LoadOptions { kv: KvStorage::Int8, device: Device::Cpu, ..LoadOptions::default() };
    let model = ModelSource::Embedded.load(&options, None).unwrap();
    let record = &passkey::records().unwrap()[0];
    let tokens = model.encode(&record.input).unwrap();
    let mut cache = model.decoder.new_cache(1, tokens.len() + 12).unwrap();
    let options = s2o_models::GenerationOptions { max_new_tokens: 12, ..Default::default() };
    let s2o = S2o::new(S2oConfig::default());
    let prefill = PrefillOptions::new().chunk(1000);
    let out = model.generate(&tokens, &mut cache, &s2o, prefill, &options, &mut |_| {}).unwrap();
    assert!(passkey::answers_exactly(&out.text, &record.answer), "{:?}, expected {}", out.text, record.answer);
}
