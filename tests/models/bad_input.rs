//! Every bad input gives a typed error with the expected value and the value found.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_s2o::Dense;
use s2o_eval::EvalError;
use s2o_eval::tasks::passkey;
use s2o_models::{
    Decoder, DecoderConfig, GenerationOptions, LoadOptions, LoadedModel, ModelError, ModelSource, PrefillOptions,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fixtures::*;

fn directory(json: &Value) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write_directory(directory.path(), json, &weights(&llama_json(), 51));
    directory
}

fn load(directory: &TempDir) -> Result<LoadedModel, ModelError> {
    ModelSource::Directory(directory.path().to_owned()).load(&LoadOptions::default(), None)
}

fn load_error(directory: &TempDir) -> ModelError {
    load(directory).unwrap_err()
}

fn config_error(changes: Value) -> ModelError {
    DecoderConfig::from_json(&with(llama_json(), changes).to_string(), "config.json").unwrap_err()
}

#[test]
fn a_dtype_that_no_layer_computes() {
    let vb = VarBuilder::from_tensors(weights(&llama_json(), 51), DType::F64, &Device::Cpu);
    let error = Decoder::load(&config(&llama_json()), &vb, None).unwrap_err();
    assert!(matches!(error, ModelError::UnsupportedFeature { feature: "dtype", .. }), "{error}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_in_a_build_without() {
    let error = s2o_models::gpu(0).unwrap_err();
    assert!(matches!(error, ModelError::NoGpu { ordinal: 0, .. }), "{error}");
    assert!(error.to_string().contains("build with the feature `cuda`"), "{error}");
}

#[test]
fn missing_files() {
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let directory = directory(&llama_json());
        std::fs::remove_file(directory.path().join(file)).unwrap();
        let error = load_error(&directory);
        assert!(matches!(&error, ModelError::MissingFile { path, .. } if path.ends_with(file)), "{error}");
    }
    let nowhere = ModelSource::Directory("no/such/directory".into()).load(&LoadOptions::default(), None).unwrap_err();
    assert_eq!(nowhere.to_string(), "no/such/directory is missing: there is no such directory");
    let sharded = tempfile::tempdir().unwrap();
    write_sharded(sharded.path(), &llama_json(), &weights(&llama_json(), 51));
    load(&sharded).unwrap();
    let shard = "model-00002-of-00002.safetensors";
    std::fs::remove_file(sharded.path().join(shard)).unwrap();
    assert!(matches!(load_error(&sharded), ModelError::MissingFile { path, .. } if path.ends_with(shard)));
    let outside = json!({"weight_map": {"x": "../elsewhere.safetensors"}}).to_string();
    std::fs::write(sharded.path().join("model.safetensors.index.json"), outside).unwrap();
    assert!(matches!(load_error(&sharded), ModelError::InvalidConfig { .. }));
}

#[test]
fn damaged_weights() {
    let directory = directory(&llama_json());
    let file = directory.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let whole = bytes.len();
    for (len, expected) in [
        (0, "at least 8 bytes".to_owned()),
        (5, "at least 8 bytes".to_owned()),
        (200, format!("more than the header's {header} bytes")),
        (whole / 2, format!("{whole} bytes")),
        (whole - 1, format!("{whole} bytes")),
        (whole + 3, format!("{whole} bytes")),
    ] {
        std::fs::write(&file, &[&bytes[..], &[0; 3]].concat()[..len]).unwrap();
        let error = load_error(&directory);
        assert!(
            matches!(&error, ModelError::InvalidWeights { path, reason }
                if *path == file && *reason == format!("expected {expected}, got {len}")),
            "{len} bytes: {error}"
        );
    }
}

#[test]
fn tensors_that_do_not_fit_the_configuration() {
    let deeper = directory(&with(llama_json(), json!({"num_hidden_layers": 3})));
    let error = load_error(&deeper);
    assert!(matches!(&error, ModelError::MissingTensor { name } if name.starts_with("model.layers.2.")), "{error}");
    let wider = directory(&with(llama_json(), json!({"intermediate_size": 160})));
    let error = load_error(&wider);
    assert!(
        matches!(&error, ModelError::WrongShape { name, expected, got }
            if name == "model.layers.0.mlp.gate_proj.weight" && *expected == [160, 64] && *got == [128, 64]),
        "{error}"
    );
    let smaller = directory(&with(llama_json(), json!({"vocab_size": 200})));
    assert!(matches!(load_error(&smaller), ModelError::WrongShape { .. }));
}

#[test]
fn tensors_that_the_model_does_not_use() {
    let shallower = directory(&with(llama_json(), json!({"num_hidden_layers": 1})));
    let error = load_error(&shallower).to_string();
    let expected =
        "tensor `model.layers.1.input_layernorm.weight`: expected only those of the configured model with 1 layers";
    assert!(error.contains(expected), "{error}");
    let with_tensor = |name: &str| {
        let directory = tempfile::tempdir().unwrap();
        let mut weights = weights(&llama_json(), 51);
        weights.insert(name.to_owned(), Tensor::ones(64, DType::F32, &Device::Cpu).unwrap());
        write_directory(directory.path(), &llama_json(), &weights);
        load(&directory)
    };
    for name in
        ["model.layers.0.self_attn.q_proj.weight_scale", "model.layers.1.self_attn.q_proj.bias", "vision.weight"]
    {
        let error = with_tensor(name).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor `{name}`: expected only")), "{error}");
    }
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq").unwrap();
    // A tied head that is stored all the same.
    let tied = with(llama_json(), json!({"tie_word_embeddings": true}));
    load(&directory(&tied)).unwrap();
}

#[test]
fn values_that_are_not_finite() {
    for (name, layer) in [
        ("model.layers.0.input_layernorm.weight", Some(0)),
        ("model.layers.0.mlp.down_proj.weight", Some(1)),
        ("model.layers.1.post_attention_layernorm.weight", None),
        ("model.norm.weight", None),
    ] {
        for value in [f32::NAN, f32::INFINITY] {
            let directory = tempfile::tempdir().unwrap();
            let mut weights = weights(&llama_json(), 51);
            let poisoned = (weights[name].zeros_like().unwrap() + f64::from(value)).unwrap();
            weights.insert(name.to_owned(), poisoned);
            write_directory(directory.path(), &llama_json(), &weights);
            let model = load(&directory).unwrap();
            let mut cache = model.decoder.new_cache(1, 200).unwrap();
            let options = (PrefillOptions::default(), &GenerationOptions::default());
            let prompt: Vec<u32> = (1..20).collect();
            let error = model.generate(&prompt, &mut cache, &Dense, options.0, options.1, &mut |_| ()).unwrap_err();
            assert!(matches!(error, ModelError::NotFinite { layer: got, .. } if got == layer), "{name}: {error}");
        }
    }
}

/// The embedding of the first new token is NaN, so the logits are finite after the prompt and not after that token.
#[test]
fn values_that_stop_being_finite() {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let prompt: Vec<u32> = (1..20).collect();
    let greedy = GenerationOptions { max_new_tokens: 3, ..GenerationOptions::default() };
    let generate = |poisoned: Option<u32>, options: &GenerationOptions| {
        let directory = tempfile::tempdir().unwrap();
        let mut weights = weights(&llama_json(), 51);
        if let Some(token) = poisoned {
            let (rows, width) = weights[EMBEDDING].dims2().unwrap();
            let mut values = weights[EMBEDDING].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values[token as usize * width..][..width].fill(f32::NAN);
            let device = weights[EMBEDDING].device().clone();
            weights.insert(EMBEDDING.to_owned(), Tensor::from_vec(values, (rows, width), &device).unwrap());
        }
        write_directory(directory.path(), &llama_json(), &weights);
        let model = load(&directory).unwrap();
        let mut cache = model.decoder.new_cache(1, 200).unwrap();
        model.generate(&prompt, &mut cache, &Dense, PrefillOptions::default(), options, &mut |_| ())
    };
    for options in [
        greedy.clone(),
        GenerationOptions { repeat_penalty: 1.1, ..greedy.clone() },
        GenerationOptions { temperature: Some(0.7), ..greedy },
    ] {
        let first = generate(None, &options).unwrap().tokens[0];
        assert!(!prompt.contains(&first), "another prompt is needed");
        let error = generate(Some(first), &options).unwrap_err();
        assert!(matches!(error, ModelError::NotFinite { layer: Some(0), .. }), "{options:?}: {error}");
    }
}

#[test]
fn unsupported_models() {
    let error = config_error(json!({"architectures": ["GPTNeoXForCausalLM"]}));
    assert!(matches!(&error, ModelError::UnsupportedArchitecture { got, .. } if got == "GPTNeoXForCausalLM"));
    let feature = |changes: Value| match config_error(changes) {
        ModelError::UnsupportedFeature { feature, .. } => feature,
        other => panic!("{other}"),
    };
    assert_eq!(feature(json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}})), "rope_scaling.rope_type");
    assert_eq!(feature(json!({"hidden_act": "gelu"})), "hidden_act");
    assert_eq!(feature(json!({"quantization_config": {"quant_method": "fp8"}})), "quantization_config");
    assert_eq!(feature(json!({"sliding_window": 4096})), "sliding_window");
    let windowed = with(qwen3_json(), json!({"use_sliding_window": true, "sliding_window": 4096}));
    let error = DecoderConfig::from_json(&windowed.to_string(), "config.json").unwrap_err();
    assert!(matches!(error, ModelError::UnsupportedFeature { feature: "use_sliding_window", .. }));
    let options = LoadOptions { dtype: Some(DType::F64), ..Default::default() };
    let error = ModelSource::Embedded.load(&options, None).unwrap_err();
    assert!(matches!(error, ModelError::UnsupportedFeature { feature: "dtype", .. }));
}

#[test]
fn malformed_configurations() {
    for text in ["", "{", "[]", "{\"architectures\": [\"LlamaForCausalLM\"]}", "{\"vocab_size\": -3}"] {
        let error = DecoderConfig::from_json(text, "config.json").unwrap_err();
        assert!(matches!(&error, ModelError::InvalidConfig { origin, .. } if origin == "config.json"), "{error}");
    }
    for changes in [
        json!({"num_hidden_layers": 0}),
        json!({"num_hidden_layers": 1025}),
        json!({"num_hidden_layers": u32::MAX}),
        json!({"num_attention_heads": 0}),
        json!({"num_key_value_heads": 3}),
        json!({"head_dim": 15}),
        json!({"hidden_size": u64::MAX}),
        json!({"rope_theta": 0.0}),
        json!({"rope_theta": 0.5}),
        json!({"rope_theta": 1e18}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}),
        json!({"rms_norm_eps": -1.0}),
        json!({"rms_norm_eps": 1e300}),
        json!({"rope_scaling": {"rope_type": "linear"}}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}}),
        json!({"rope_scaling": 5}),
        json!({"rope_scaling": "yarn"}),
        json!({"rope_scaling": [1]}),
        json!({"rope_scaling": {"factor": 4.0}}),
        json!({"rope_scaling": {"rope_type": 7}}),
        json!({"rope_scaling": {"rope_type": null, "factor": 4.0}}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": "4"}}),
        json!({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}),
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}}),
        json!({"rope_theta": "1e6"}),
        json!({"rope_theta": null}),
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": null}}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": null}}),
    ] {
        let error = config_error(changes.clone());
        assert!(matches!(error, ModelError::InvalidConfig { .. }), "{changes}: {error}");
    }
    let directory = directory(&llama_json());
    std::fs::write(directory.path().join("tokenizer.json"), "{}").unwrap();
    assert!(matches!(load_error(&directory), ModelError::Tokenizer { .. }));
    // tokenizers itself panics on these.
    let good = tiny_tokenizer().to_string(false).unwrap();
    let prefixed = good.replacen("\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"####\"", 1);
    let broken = good.replacen("\"use_regex\"", "\"use_regex", 1);
    let long = good.replacen("[\"t\",\"h\"]", "[\"<|im_end|>\",\"<|bos|>\"]", 1);
    for (text, part) in
        [(prefixed, "merges: expected two tokens"), (broken, "expected"), (long, "merges: expected two tokens")]
    {
        assert_ne!(text, good);
        std::fs::write(directory.path().join("tokenizer.json"), text).unwrap();
        let error = load_error(&directory);
        assert!(matches!(error, ModelError::Tokenizer { .. }) && error.to_string().contains(part), "{error}");
    }
    std::fs::write(directory.path().join("tokenizer.json"), "{}").unwrap();
    std::fs::write(directory.path().join("generation_config.json"), r#"{"eos_token_id": "x"}"#).unwrap();
    assert!(matches!(load_error(&directory), ModelError::InvalidConfig { .. }));
}

#[test]
fn a_tokenizer_neither_cuts_nor_fills_up_a_prompt() {
    let directory = directory(&llama_json());
    let path = directory.path().join("tokenizer.json");
    let text = "One two three four five six seven eight nine ten.";
    let tokens = load(&directory).unwrap().encode(text).unwrap();
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (direction, stride) in [("Right", 0), ("Left", 4)] {
        json["truncation"] =
            json!({"direction": direction, "max_length": 4, "strategy": "LongestFirst", "stride": stride});
        json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
        std::fs::write(&path, json.to_string()).unwrap();
        assert_eq!(load(&directory).unwrap().encode(text).unwrap(), tokens);
    }
}

#[test]
fn bad_prompts() {
    let decoder = decoder(&llama_json(), 52);
    let mut cache = decoder.new_cache(1, 20).unwrap();
    let mut error_of = |tokens: &Tensor, options: PrefillOptions| {
        let error = decoder.prefill(tokens, &mut cache, &Dense, options).unwrap_err();
        assert_eq!(cache.len(), 0, "a refused prompt leaves nothing in the cache");
        error
    };
    assert!(matches!(error_of(&tokens(1, 5, 288), PrefillOptions::new().chunk(0)), ModelError::EmptyChunk));
    let mut error = |tokens: &Tensor| error_of(tokens, PrefillOptions::new());
    let empty = Tensor::zeros((1, 0), DType::U32, &Device::Cpu).unwrap();
    assert!(matches!(error(&empty), ModelError::EmptyPrompt));
    assert!(matches!(error(&tokens(1, 21, 288)), ModelError::CacheFull { expected: 20, got: 21 }));
    assert!(matches!(error(&tokens(1, 257, 288)), ModelError::ContextTooLong { expected: 256, got: 257 }));
    let outside = Tensor::new(&[[1u32, 288]], &Device::Cpu).unwrap();
    assert!(matches!(error(&outside), ModelError::TokenOutOfRange { expected: 288, got: 288 }));
    let flat = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    for wrong in [flat, tokens(2, 3, 288), tokens(1, 3, 288).to_dtype(DType::I64).unwrap()] {
        assert!(matches!(error(&wrong), ModelError::WrongInput { .. }));
    }
}

#[test]
fn bad_decoding() {
    let decoder = decoder(&llama_json(), 53);
    assert!(matches!(decoder.new_cache(1, 257), Err(ModelError::ContextTooLong { expected: 256, got: 257 })));
    assert!(matches!(decoder.new_cache(0, 5), Err(ModelError::WrongInput { .. })));
    assert!(matches!(decoder.new_cache(1, 0), Err(ModelError::WrongInput { .. })));
    let mut cache = decoder.new_cache(1, 3).unwrap();
    decoder.prefill(&tokens(1, 3, 288), &mut cache, &Dense, PrefillOptions::new()).unwrap();
    let error = decoder.decode(&tokens(1, 1, 288), &mut cache).unwrap_err();
    assert!(matches!(error, ModelError::CacheFull { expected: 3, got: 4 }));
    let error = decoder.decode_ids(&[1], &mut cache).unwrap_err();
    assert!(matches!(error, ModelError::CacheFull { expected: 3, got: 4 }));
    cache.reset();
    assert!(matches!(decoder.decode_ids(&[], &mut cache), Err(ModelError::EmptyPrompt)));
    assert!(matches!(decoder.decode_ids(&[1, 2], &mut cache), Err(ModelError::WrongInput { .. })));
    let error = decoder.decode_ids(&[288], &mut cache).unwrap_err();
    assert!(matches!(error, ModelError::TokenOutOfRange { expected: 288, got: 288 }));
    assert!(matches!(decoder.decode(&tokens(1, 2, 288), &mut cache), Err(ModelError::WrongInput { .. })));
    assert!(cache.layer(2).is_err());
    let none = PrefillOptions::new().num_logits(0);
    let out = decoder.prefill(&tokens(1, 3, 288), &mut cache, &Dense, none).unwrap();
    assert_eq!((out.logits.dims(), out.hidden.dims()), (&[1, 0, 288][..], &[1, 64][..]));
    assert!(matches!(out.last_logits(), Err(ModelError::WrongInput { .. })));
}

#[test]
fn generation_that_cannot_fit_is_refused_before_any_work() {
    let model = load(&directory(&llama_json())).unwrap();
    let mut cache = model.decoder.new_cache(1, 30).unwrap();
    let mut run = |prompt: &[u32], max_new_tokens: usize| {
        let options = GenerationOptions { max_new_tokens, ..Default::default() };
        let prefill = PrefillOptions::new();
        let result = model.generate(prompt, &mut cache, &Dense, prefill, &options, &mut |_| ());
        let len = cache.len();
        cache.reset();
        (result, len)
    };
    assert!(matches!(run(&[1; 20], 12), (Err(ModelError::CacheFull { expected: 30, got: 31 }), 0)));
    assert!(matches!(run(&[1; 20], 500), (Err(ModelError::ContextTooLong { expected: 256, got: 519 }), 0)));
    assert!(matches!(run(&[], 5), (Err(ModelError::EmptyPrompt), 0)));
    assert!(run(&[1; 20], 11).0.is_ok());
}

#[test]
fn sampling_that_cannot_be_is_refused_before_any_work() {
    let model = load(&directory(&llama_json())).unwrap();
    let mut cache = model.decoder.new_cache(1, 30).unwrap();
    let defaults = GenerationOptions { max_new_tokens: 2, temperature: Some(0.5), ..Default::default() };
    for (options, name) in [
        (GenerationOptions { temperature: Some(-1.0), ..defaults.clone() }, "temperature"),
        (GenerationOptions { temperature: Some(f64::NAN), ..defaults.clone() }, "temperature"),
        (GenerationOptions { top_k: Some(0), ..defaults.clone() }, "top-k"),
        (GenerationOptions { top_p: Some(1.5), ..defaults.clone() }, "top-p"),
        (GenerationOptions { repeat_penalty: 0.0, ..defaults.clone() }, "repeat-penalty"),
    ] {
        let result = model.generate(&[1; 5], &mut cache, &Dense, PrefillOptions::new(), &options, &mut |_| ());
        let error = result.unwrap_err();
        assert!(matches!(&error, ModelError::WrongInput { what, .. } if *what == name), "{error}");
        assert_eq!(cache.len(), 0);
    }
}

#[test]
fn a_tokenizer_larger_than_the_embedding() {
    let small = with(llama_json(), json!({"vocab_size": 200, "eos_token_id": 7}));
    let directory = tempfile::tempdir().unwrap();
    write_directory(directory.path(), &small, &weights(&small, 54));
    assert!(matches!(load_error(&directory), ModelError::InvalidConfig { .. }));
}

#[test]
fn a_tokenizer_far_smaller_than_the_embedding() {
    // The tokenizer has 261 tokens.
    let of_rows = |rows: usize| {
        let json = with(llama_json(), json!({"vocab_size": rows}));
        let directory = tempfile::tempdir().unwrap();
        write_directory(directory.path(), &json, &weights(&json, 55));
        load(&directory)
    };
    of_rows(326).unwrap();
    let error = of_rows(327).unwrap_err();
    assert!(matches!(error, ModelError::InvalidConfig { .. }), "{error}");
    let expected =
        "the embedding has 327 rows, but the tokenizer only 261 tokens: expected the tokenizer of this model";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn passkeys_that_cannot_be() {
    let tokenizer = tiny_tokenizer();
    assert!(matches!(passkey::build(&tokenizer, 50, 0.5, 0), Err(EvalError::ContextTooShort { got: 50, .. })));
    for depth in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(passkey::build(&tokenizer, 5000, depth, 0), Err(EvalError::WrongInput { .. })));
    }
}

#[test]
fn loading_without_weights_names_the_first_tensor() {
    let vb = VarBuilder::from_tensors(Default::default(), DType::F32, &Device::Cpu);
    let error = Decoder::load(&config(&llama_json()), &vb, None).unwrap_err();
    assert!(matches!(error, ModelError::MissingTensor { name } if name == "model.embed_tokens.weight"));
}
