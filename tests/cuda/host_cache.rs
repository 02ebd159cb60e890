//! A KV cache in memory of the host gives the bits of one on the GPU, whatever is done to both.

use candle_core::{DType, Tensor};
use candle_s2o::{Dense, S2o, S2oConfig, SegmentLen};
use s2o_models::{Decoder, KvCache, KvStorage, ModelError, PrefillOptions};
use serde_json::json;

use crate::Runner;
use crate::decoder::{llama, load, qwen3, tokens, values};

const CAPACITY: usize = 1200;

/// Prefills `count` tokens from token `first` on in chunks, and decodes two more: all logits.
fn run(decoder: &Decoder, cache: &mut KvCache, (first, count): (usize, usize), chunk: usize) -> Vec<f32> {
    let all = tokens(1, first + count + 2, decoder.device());
    let part = |at: usize, len: usize| all.narrow(1, at, len).unwrap().contiguous().unwrap();
    let s2o = S2oConfig::builder().segment_len(SegmentLen::Fixed(128)).dense_below(300).tau(0.2).build().unwrap();
    let options = PrefillOptions::new().chunk(chunk).num_logits(40);
    let out = decoder.prefill(&part(first, count), cache, &S2o::new(s2o), options).unwrap();
    let mut logits = values(&out.logits);
    for i in 0..2 {
        logits.extend(values(&decoder.decode(&part(first + count + i, 1), cache).unwrap()));
    }
    logits
}

fn rows(cache: &KvCache, layer: usize) -> [Vec<f32>; 2] {
    let (k, v) = cache.layer(layer).unwrap();
    [k, v].map(|side: Tensor| values(&side.to_dtype(DType::F32).unwrap()))
}

pub fn cases(runner: &mut Runner) {
    for (name, json) in [("llama", llama()), ("qwen3", qwen3())] {
        for num_layers in [1, 2, 3, 4] {
            runner.case(&format!("host cache {name} of {num_layers} layers"), |runner| {
                let mut json = json.clone();
                json["num_hidden_layers"] = json!(num_layers);
                let decoder = load(&json, DType::BF16, &runner.device);
                let cache = |storage| decoder.new_cache_in(storage, 1, CAPACITY).unwrap();
                let mut caches = [cache(KvStorage::AsComputed), cache(KvStorage::Host)];
                let mut same = |what: &str, change: &dyn Fn(&mut KvCache) -> Vec<f32>| {
                    let [on_gpu, on_host] = &mut caches;
                    assert!(change(on_gpu) == change(on_host), "{what}");
                    assert_eq!(on_gpu.len(), on_host.len());
                };
                same("several chunks", &|cache| run(&decoder, cache, (0, 900), 256));
                same("another turn", &|cache| run(&decoder, cache, (902, 200), 64));
                same("a common prefix", &|cache| {
                    cache.truncate(333);
                    run(&decoder, cache, (7, 500), 129)
                });
                same("another prompt", &|cache| {
                    cache.reset();
                    run(&decoder, cache, (50, 700), 700)
                });
                // Layers in any order, also twice.
                for layer in (0..num_layers).rev().chain(0..num_layers).chain([0, num_layers - 1, num_layers - 1]) {
                    same("rows of a layer", &|cache| rows(cache, layer).concat());
                }
                same("after the rows were read", &|cache| run(&decoder, cache, (3, 40), 16));
                same("through a view", &|cache| run(&decoder, &mut cache.sequences(0..1).unwrap(), (11, 30), 16));
            });
        }
    }
    runner.case("host cache errors", |runner| {
        let decoder = load(&llama(), DType::BF16, &runner.device);
        let several = decoder.new_cache_in(KvStorage::Host, 2, 100).unwrap_err().to_string();
        assert!(several.contains("sequences of a KV cache in host memory: expected 1, got 2"), "{several}");
        let mut json = llama();
        json["max_position_embeddings"] = json!(2_000_000_000u32);
        json["num_hidden_layers"] = json!(64);
        let decoder = load(&json, DType::BF16, &runner.device);
        // 64 layers of 16 million rows of 512 bytes: 512 GiB on the host, and 16 GiB on the GPU.
        match decoder.new_cache_in(KvStorage::Host, 1, 1 << 24) {
            Err(ModelError::OutOfHostMemory { asked, free, .. }) => {
                assert_eq!(asked, 1 << 39);
                assert!(free < asked);
            }
            other => panic!("{other:?}"),
        }
        let mut cache = decoder.new_cache_in(KvStorage::Host, 1, 10).unwrap();
        let full = decoder.prefill(&tokens(1, 11, &runner.device), &mut cache, &Dense, PrefillOptions::new());
        assert!(matches!(full, Err(ModelError::CacheFull { expected: 10, got: 11 })), "{full:?}");
    });
}
