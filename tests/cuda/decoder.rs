//! Whole decoders: on the GPU in 16 bits against the CPU in f32, and chunked against whole prompts.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_s2o::{Attention, Dense, PrefillCall, S2o, S2oConfig};
use s2o_models::fused::{LinearPrecision, supports_int8};
use s2o_models::weights::synthetic;
use s2o_models::{
    Chunk, Decoder, DecoderConfig, DecoderOptions, GenerationOptions, LoadOptions, ModelError, ModelSource,
    PrefillOptions, passkey,
};
use serde_json::{Value, json};

use crate::Runner;

pub fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 288, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false,
        "attention_bias": true, "mlp_bias": true,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256},
    })
}

pub fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "vocab_size": 288, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": true,
        "attention_bias": false, "sliding_window": null, "use_sliding_window": false, "max_window_layers": 3,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    })
}

pub fn load(json: &Value, dtype: DType, device: &Device) -> Decoder {
    let config = DecoderConfig::from_json(&json.to_string(), "test").unwrap();
    let weights = synthetic::weights(&config, 5, &Device::Cpu).unwrap();
    Decoder::load(&config, &VarBuilder::from_tensors(weights, dtype, device), None).unwrap()
}

fn load_int8(json: &Value, device: &Device) -> Decoder {
    let config = DecoderConfig::from_json(&json.to_string(), "test").unwrap();
    let weights = synthetic::weights(&config, 5, &Device::Cpu).unwrap();
    let options = DecoderOptions { linear: LinearPrecision::Int8, ..DecoderOptions::default() };
    Decoder::load_with(&config, &VarBuilder::from_tensors(weights, DType::BF16, device), options, None).unwrap()
}

pub fn tokens(batch: usize, len: usize, device: &Device) -> Tensor {
    let ids: Vec<u32> = (0..(batch * len) as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) % 288).collect();
    Tensor::from_vec(ids, (batch, len), device).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts that logits differ by less than `part` of the largest.
fn assert_near(what: &str, got: &Tensor, want: &Tensor, part: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let (got, want) = (values(got), values(want));
    let largest = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let off = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
    let off = off.fold(0.0f32, |max, x| if x.is_nan() { f32::INFINITY } else { max.max(x) });
    assert!(off < part * largest, "{what}: {off} off, logits up to {largest}");
}

/// Logits of the last 40 of `len` positions, and of three decoded tokens.
fn logits(decoder: &Decoder, batch: usize, len: usize, method: &dyn Attention, chunk: Chunk) -> [Tensor; 2] {
    let tokens = tokens(batch, len + 3, decoder.device());
    let mut cache = decoder.new_cache(batch, len + 3).unwrap();
    let options = PrefillOptions::new().chunk(chunk).num_logits(40);
    let prompt = tokens.narrow(1, 0, len).unwrap();
    let prefilled = decoder.prefill(&prompt, &mut cache, method, options).unwrap().logits;
    let decoded: Vec<Tensor> = (len..len + 3)
        .map(|i| decoder.decode(&tokens.narrow(1, i, 1).unwrap().contiguous().unwrap(), &mut cache).unwrap())
        .collect();
    assert_eq!(cache.len(), len + 3);
    [prefilled, Tensor::stack(&decoded, 1).unwrap()]
}

pub fn cases(runner: &mut Runner) {
    for (name, json) in [("llama", llama()), ("qwen3", qwen3())] {
        for dtype in [DType::BF16, DType::F16] {
            for (batch, len) in [(1, 41), (2, 300), (1, 1037)] {
                runner.case(&format!("decoder {name} {dtype:?} {batch} x {len}"), |runner| {
                    let (here, there) = (load(&json, DType::F32, &Device::Cpu), load(&json, dtype, &runner.device));
                    let want = logits(&here, batch, len, &Dense, Chunk::Whole);
                    let whole = logits(&there, batch, len, &Dense, Chunk::Whole);
                    let tolerance = if dtype == DType::BF16 { 0.05 } else { 0.01 };
                    assert_near("prefill", &whole[0], &want[0], tolerance);
                    assert_near("decoding", &whole[1], &want[1], tolerance);
                    for chunk in [Chunk::Tokens(64), Chunk::Tokens(129), Chunk::Auto] {
                        let chunked = logits(&there, batch, len, &Dense, chunk);
                        assert_near(&format!("{chunk:?}"), &chunked[0], &whole[0], tolerance);
                        assert_near(&format!("decoding after {chunk:?}"), &chunked[1], &whole[1], tolerance);
                    }
                });
            }
        }
        runner.case(&format!("decoder {name} F32 by Candle's ops"), |runner| {
            let (here, there) = (load(&json, DType::F32, &Device::Cpu), load(&json, DType::F32, &runner.device));
            let want = logits(&here, 2, 300, &Plain, Chunk::Whole);
            let got = logits(&there, 2, 300, &Plain, Chunk::Tokens(129));
            assert_near("prefill", &got[0], &want[0], 2e-3);
            assert_near("decoding", &got[1], &want[1], 2e-3);
        });
    }
    if supports_int8(&runner.device, DType::BF16) {
        // Without biases all outputs are added in place, with those of attention only the MLP's.
        let mut half = llama();
        half["mlp_bias"] = json!(false);
        for (name, json) in [("qwen3", qwen3()), ("llama, biases of attention", half), ("llama", llama())] {
            runner.case(&format!("decoder {name}, linear layers in int8"), |runner| {
                let (here, there) = (load(&json, DType::F32, &Device::Cpu), load_int8(&json, &runner.device));
                for (batch, len) in [(1, 41), (2, 300), (1, 1037)] {
                    let want = logits(&here, batch, len, &Dense, Chunk::Whole);
                    for chunk in [Chunk::Whole, Chunk::Tokens(64), Chunk::Tokens(129)] {
                        let got = logits(&there, batch, len, &Dense, chunk);
                        assert_near(&format!("{batch} x {len} in {chunk:?}"), &got[0], &want[0], 0.12);
                        assert_near(&format!("decoding after {batch} x {len} in {chunk:?}"), &got[1], &want[1], 0.12);
                    }
                }
            });
        }
    }
    runner.case("decoder twice the same bits", |runner| {
        let decoder = load(&llama(), DType::BF16, &runner.device);
        let run = || logits(&decoder, 1, 1037, &Dense, Chunk::Tokens(512)).map(|logits| values(&logits));
        assert!(run() == run());
    });
    runner.case("decoder loaded, used and dropped by several threads", |_| threads());
    runner.case("decoder auto chunks are whole segments", |runner| {
        let decoder = load(&llama(), DType::BF16, &runner.device);
        let chunk = decoder.chunk_tokens(Chunk::Auto, 1).unwrap().unwrap();
        assert!(chunk.is_multiple_of(2048) && (2048..=65536).contains(&chunk), "{chunk}");
    });
    runner.case("decoder out of memory is typed", |runner| {
        let mut json = llama();
        json["max_position_embeddings"] = json!(2_000_000_000u32);
        let decoder = load(&json, DType::BF16, &runner.device);
        match decoder.new_cache(1, 2_000_000_000) {
            Err(ModelError::OutOfMemory { asked, free, total, .. }) => {
                assert_eq!(asked, 2_000_000_000 * 2 * 3 * 128 * 2);
                assert!(free <= total && total < asked);
            }
            other => panic!("expected OutOfMemory, got {:?}", other.map(|cache| cache.len())),
        }
    });
    runner.case("decoder needle-11m", |runner| needle(&runner.device));
}

/// Each step is enqueued by a thread of its own while the GPU is still busy with the step before.
fn threads() {
    let device = s2o_models::gpu(0).unwrap();
    let len = 3000;
    let run = |in_threads: bool| {
        fn step<T: Send>(in_thread: bool, work: impl FnOnce() -> T + Send) -> T {
            if in_thread { std::thread::scope(|scope| scope.spawn(work).join().unwrap()) } else { work() }
        }
        let decoder = step(in_threads, || load(&llama(), DType::BF16, &device));
        let tokens = step(in_threads, || tokens(2, len, &device));
        let mut cache = step(in_threads, || decoder.new_cache(2, len + 3).unwrap());
        let prefilled = step(in_threads, || {
            let options = PrefillOptions::new().chunk(Chunk::Tokens(512)).num_logits(40);
            decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap().logits
        });
        let decoded: Vec<Tensor> =
            (0..3).map(|id| step(in_threads, || decoder.decode_ids(&[id, id + 1], &mut cache).unwrap())).collect();
        step(in_threads, move || drop((decoder, tokens, cache)));
        // Memory that was freed too early is likely to be taken and overwritten by this.
        let other = step(in_threads, || Tensor::full(1.0f32, (64, 1 << 20), &device).unwrap());
        let logits = [prefilled, Tensor::stack(&decoded, 1).unwrap()].map(|logits| values(&logits));
        drop(other);
        logits
    };
    let want = run(false);
    for _ in 0..10 {
        assert!(run(true) == want);
    }
}

fn needle(device: &Device) {
    let load = |device: &Device, dtype| {
        let options = LoadOptions { device: device.clone(), dtype: Some(dtype), ..Default::default() };
        ModelSource::Embedded.load(&options, None).unwrap()
    };
    let (here, there) = (load(&Device::Cpu, DType::F32), load(device, DType::BF16));
    let prompt = s2o_eval::tasks::passkey::build(&here.tokenizer, 3000, 0.4, 7).unwrap();
    let sparse = S2o::new(S2oConfig::builder().dense_below(0).build().unwrap());
    let run = |model: &s2o_models::LoadedModel, method: &dyn Attention, chunk: Chunk| {
        let tokens = model.prompt(&prompt.tokens).unwrap();
        let mut cache = model.decoder.new_cache(1, prompt.tokens.len() + 24).unwrap();
        let options = PrefillOptions::new().chunk(chunk).num_logits(16);
        let logits = model.decoder.prefill(&tokens, &mut cache, method, options).unwrap().logits;
        cache.reset();
        let options = GenerationOptions { max_new_tokens: 24, ..Default::default() };
        let prefill = PrefillOptions::new().chunk(chunk);
        let out = model.generate(&prompt.tokens, &mut cache, method, prefill, &options, &mut |_| {}).unwrap();
        (logits, out.text)
    };
    let (want, text) = run(&here, &Dense, Chunk::Whole);
    assert!(passkey::answers_exactly(&text, &prompt.answer), "the CPU says {text:?}");
    for (name, method, part) in [("dense", &Dense as &dyn Attention, 0.08), ("s2o", &sparse, 0.25)] {
        for chunk in [Chunk::Whole, Chunk::Tokens(1000), Chunk::Auto] {
            let (logits, text) = run(&there, method, chunk);
            assert!(passkey::answers_exactly(&text, &prompt.answer), "{name} {chunk:?}: {text:?}");
            assert_near(name, &logits, &want, part);
        }
    }
}

/// Dense attention with Candle's matrix products, for f32 on a GPU.
#[derive(Debug)]
struct Plain;

impl Attention for Plain {
    fn name(&self) -> &str {
        "plain"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let (q_len, k_len, group) = (q.dim(1)?, k.dim(1)?, q.dim(2)? / k.dim(2)?);
        let heads: Vec<u32> = (0..q.dim(2)? as u32).map(|head| head / group as u32).collect();
        let heads = Tensor::new(heads, q.device())?;
        let per_head = |x: &Tensor| x.contiguous()?.index_select(&heads, 2)?.transpose(1, 2)?.contiguous();
        let (k, v) = (per_head(k)?, per_head(v)?);
        let hidden = |i: usize| (0..k_len).map(move |j| if j > i + k_len - q_len { f32::NEG_INFINITY } else { 0.0 });
        let mask: Vec<f32> = (0..q_len).flat_map(hidden).collect();
        let mask = Tensor::from_vec(mask, (q_len, k_len), q.device())?;
        let scores = (q.transpose(1, 2)?.contiguous()?.matmul(&k.t()?)? * f64::from(call.softmax_scale))?;
        let weights = candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&mask)?)?;
        weights.matmul(&v)?.transpose(1, 2)?.contiguous()
    }
}
