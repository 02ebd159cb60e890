//! Synthetic models: the same weights in every model, attention as calibrated, and refusals.

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use candle_s2o::{AttnStats, S2o, S2oConfig};
use candle_transformers::models::llama;
use s2o_models::weights::synthetic::{self, Profile, Shape, Synthetic};
use s2o_models::{Decoder, DecoderConfig, LoadOptions, ModelError, ModelSource, PrefillOptions};
use serde_json::{Value, json};

use crate::fixtures::*;

/// Wide enough heads, and the rotation of Llama 3.1 for 131,072 positions.
fn json() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": false,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    })
}

fn builder_of(config: &DecoderConfig, profile: Profile, seed: u64) -> VarBuilder<'static> {
    synthetic::var_builder(config, profile, seed, DType::F32, &Device::Cpu).unwrap()
}

/// Density of S2O over all layers and heads, and of each head.
fn density(json: &Value, profile: Profile, len: usize) -> (f64, Vec<f64>) {
    let config = config(json);
    let decoder = Decoder::load(&config, &builder_of(&config, profile, 1), None).unwrap();
    let tokens = synthetic::prompt(config.vocab_size, len, 2);
    let tokens = candle_core::Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let s2o = S2o::new(S2oConfig::default()).with_stats();
    let mut cache = decoder.new_cache(1, len).unwrap();
    decoder.prefill(&tokens, &mut cache, &s2o, PrefillOptions::new()).unwrap();
    let stats = s2o.take_stats().unwrap();
    let heads = stats.values().flat_map(|layer| layer.heads.iter().map(|head| head.density())).collect();
    (AttnStats::joint_density(stats.values()), heads)
}

#[test]
fn candles_llama_takes_the_same_weights() {
    // Candle's Llama derives head_dim from the other sizes.
    let json = with(json(), json!({"num_attention_heads": 8, "hidden_size": 512, "vocab_size": 288}));
    let config = config(&json);
    for profile in [Profile::default(), Profile::Random] {
        let vb = builder_of(&config, profile, 3);
        let theirs: llama::LlamaConfig = serde_json::from_value(json.clone()).unwrap();
        let theirs = theirs.into_config(false);
        let candle = llama::Llama::load(vb.clone(), &theirs).unwrap();
        let mut candle_cache = llama::Cache::new(true, DType::F32, &theirs, &Device::Cpu).unwrap();
        let decoder = Decoder::load(&config, &vb, None).unwrap();

        let tokens = tokens(1, 130, 288);
        let ours = last_logits(&decoder, &tokens);
        let theirs = candle.forward(&tokens, 0, &mut candle_cache).unwrap();
        let difference = max_diff(&ours, &theirs);
        assert!(difference < 1e-3 && max_abs(&theirs) > 0.5, "{profile:?}: {difference} of {}", max_abs(&theirs));
    }
}

#[test]
fn a_tensor_depends_on_seed_and_name_alone() {
    let config = config(&json());
    let (first, again, other) = (
        builder_of(&config, Profile::default(), 5),
        builder_of(&config, Profile::default(), 5),
        builder_of(&config, Profile::default(), 6),
    );
    let shapes = config.tensor_shapes();
    let read = |vb: &VarBuilder, (name, shape): &(String, Vec<usize>)| values(&vb.get(shape.as_slice(), name).unwrap());
    let forward: Vec<Vec<f32>> = shapes.iter().map(|tensor| read(&first, tensor)).collect();
    let mut backward: Vec<Vec<f32>> = shapes.iter().rev().map(|tensor| read(&again, tensor)).collect();
    backward.reverse();
    assert!(forward == backward, "the order of reading must not matter");
    for (tensor, values) in shapes.iter().zip(&forward) {
        let (name, shape) = tensor;
        assert!(values.iter().all(|value| value.is_finite()), "{name}");
        if let &[rows, columns] = shape.as_slice() {
            assert_ne!(&read(&other, tensor), values, "{name} with another seed");
            let zeros = values.iter().filter(|value| **value == 0.0).count();
            // The reserved channels: o_proj and down_proj do not write them, and projections mostly do not read them.
            assert!(zeros <= 3 * rows.max(columns), "{name}: {zeros} zeros of {}", values.len());
        }
    }
    for (i, (name, _)) in shapes.iter().enumerate() {
        let twin = shapes[..i].iter().position(|(n, _)| *n == name.replace("layers.1", "layers.0") && n != name);
        if let (Some(twin), true) = (twin, name.contains("proj")) {
            assert_ne!(forward[i], forward[twin], "{name} in both layers");
        }
    }
}

#[test]
fn attention_is_as_calibrated() {
    let calibrated = |focus| density(&json(), Profile::Calibrated { focus }, 8192);
    let (one, heads) = calibrated(1.0);
    let ((two, _), (half, _)) = (calibrated(2.0), calibrated(0.5));
    let (random, random_heads) = density(&json(), Profile::Random, 8192);
    println!("density: focus 2 {two:.3}, 1 {one:.3}, 0.5 {half:.3}, random {random:.3}; heads at 1 {heads:.3?}");
    // needle-7m has 0.54 at this length and SmolLM2 0.33 (docs/synthetic.md).
    assert!((0.25..0.6).contains(&one), "{one}");
    assert!(two < 0.8 * one && half > 1.2 * one && random > 0.95, "{two} {one} {half} {random}");
    let spread =
        |heads: &[f64]| heads.iter().fold(0.0_f64, |m, d| m.max(*d)) - heads.iter().fold(1.0_f64, |m, d| m.min(*d));
    assert!(spread(&heads) > 0.3 && spread(&random_heads) < 0.1, "{heads:?} {random_heads:?}");
}

#[test]
fn q_and_k_norms_change_nothing() {
    let qwen3 = with(json(), json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}));
    let (llama, _) = density(&json(), Profile::default(), 4096);
    let (qwen3, heads) = density(&qwen3, Profile::default(), 4096);
    assert!((llama - qwen3).abs() < 0.05, "{llama} {qwen3} {heads:?}");
}

#[test]
fn presets_are_the_models() {
    let presets = [
        ("llama-3.1-8b", 8_030_261_248, 32, 32),
        ("llama-3.1-70b", 70_553_706_496, 80, 64),
        ("qwen3-8b", 8_190_735_360, 36, 32),
    ];
    for (shape, parameters, layers, heads) in presets {
        let shape: Shape = shape.parse().unwrap();
        let config = shape.config().unwrap();
        assert_eq!((config.num_parameters(), config.num_layers), (parameters, layers), "{shape:?}");
        assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (heads, 8, 128));
        assert_eq!(config.max_positions, 131_072);
        // Nothing is made before it is requested.
        let vb = synthetic::var_builder(&config, Profile::default(), 0, DType::BF16, &Device::Cpu).unwrap();
        let k = vb.get((1024, config.hidden_size), "model.layers.31.self_attn.k_proj.weight").unwrap();
        assert_eq!(k.dtype(), DType::BF16);
    }
    let llama: llama::LlamaConfig = serde_json::from_str(&Shape::Llama31_8b.json().unwrap()).unwrap();
    assert_eq!(llama.num_key_value_heads(), 8);
}

#[test]
fn a_synthetic_model_says_so_and_speaks_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    std::fs::write(&path, llama_json().to_string()).unwrap();
    let source = |profile| {
        let shape = path.to_str().unwrap().parse().unwrap();
        ModelSource::Synthetic(Synthetic { shape, profile, seed: 0 })
    };
    let model = source(Profile::default()).load(&LoadOptions::default(), None).unwrap();
    let shape = directory.path().file_name().unwrap().to_str().unwrap();
    assert!(model.is_synthetic);
    assert_eq!(model.name, format!("synthetic-{shape}-calibrated"));
    assert_eq!(source(Profile::Random).name(), format!("synthetic-{shape}-random"));
    assert_eq!(source(Profile::Calibrated { focus: 0.5 }).name(), format!("synthetic-{shape}-focus-0.5"));

    assert_eq!(model.encode("17 287\n5").unwrap(), [0, 17, 287, 5]);
    assert_eq!(model.decode_text(&[0, 17, 287, 5]).unwrap(), "17 287 5");
    for text in ["words", "17 288", "-1"] {
        assert!(matches!(model.encode(text), Err(ModelError::Tokenizer { .. })), "{text}");
    }
    assert!(!ModelSource::Embedded.load(&LoadOptions::default(), None).unwrap().is_synthetic);
}

#[test]
fn prompts_are_the_seeds() {
    let prompt = synthetic::prompt(100, 5000, 1);
    assert_eq!((prompt.len(), prompt[0]), (5000, synthetic::FIRST_TOKEN));
    assert!(prompt[1..].iter().all(|id| (1..100).contains(id)));
    assert_eq!(prompt, synthetic::prompt(100, 5000, 1));
    assert_ne!(prompt, synthetic::prompt(100, 5000, 2));
    assert_eq!(synthetic::prompt(1, 3, 0), [0, 0, 0]);
    assert!(synthetic::prompt(100, 0, 0).is_empty());
}

#[test]
fn what_cannot_be_is_refused() {
    assert!(matches!("llama".parse::<Shape>(), Err(ModelError::InvalidShape { got }) if got == "llama"));
    let missing: Shape = "no/such/config.json".parse().unwrap();
    assert!(matches!(missing.config(), Err(ModelError::MissingFile { .. })));
    let config = config(&json());
    for focus in [-0.1, 4.1, f64::NAN] {
        let profile = Profile::Calibrated { focus };
        let error = synthetic::var_builder(&config, profile, 0, DType::F32, &Device::Cpu).err().unwrap();
        assert!(matches!(&error, ModelError::WrongInput { .. }), "{error}");
        assert!(error.to_string().contains("a number from 0 to 4"), "{error}");
    }
    let narrow = DecoderConfig { head_dim: 8, ..config.clone() };
    let error = synthetic::var_builder(&narrow, Profile::default(), 0, DType::F32, &Device::Cpu).err().unwrap();
    assert!(error.to_string().contains("head_dim is 8, expected at least 16"), "{error}");
    assert!(synthetic::var_builder(&narrow, Profile::Random, 0, DType::F32, &Device::Cpu).is_ok());

    let vb = builder_of(&config, Profile::default(), 0);
    let wider = DecoderConfig { intermediate_size: 513, ..config.clone() };
    let error = Decoder::load(&wider, &vb, None).unwrap_err();
    assert!(matches!(&error, ModelError::WrongShape { name, .. } if name.contains("gate_proj")), "{error}");
    let deeper = DecoderConfig { num_layers: 3, ..config };
    let error = Decoder::load(&deeper, &vb, None).unwrap_err();
    assert!(matches!(&error, ModelError::MissingTensor { name } if name.contains("layers.2.")), "{error}");
}

#[test]
fn a_saved_model_is_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let shape = directory.path().join("shape.json");
    std::fs::write(&shape, with(json(), json!({"vocab_size": 288})).to_string()).unwrap();
    let model = Synthetic { shape: Shape::Config(shape), profile: Profile::default(), seed: 8 };
    let saved = directory.path().join("new/model");
    let mut reports = Vec::new();
    let bytes = model.save(&saved, DType::F32, &Device::Cpu, Some(&mut |done, all| reports.push((done, all)))).unwrap();
    let tensors = model.shape.config().unwrap().tensor_shapes().len();
    assert_eq!(reports, (1..=tensors).map(|done| (done, tensors)).collect::<Vec<_>>());
    let index: Value =
        serde_json::from_str(&std::fs::read_to_string(saved.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], bytes);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), tensors);

    let load = |source: ModelSource| source.load(&LoadOptions::default(), None).unwrap();
    let (made, read) = (load(ModelSource::Synthetic(model.clone())), load(ModelSource::Directory(saved.clone())));
    assert_eq!(made.num_parameters() * 4, bytes);
    let tokens = tokens(1, 130, 288);
    assert_eq!(values(&last_logits(&made.decoder, &tokens)), values(&last_logits(&read.decoder, &tokens)));
    assert_eq!(read.tokenizer.encode("17 4", true).unwrap().get_ids(), [0, 17, 4]);

    // Nothing is overwritten.
    let error = model.save(&saved, DType::F32, &Device::Cpu, None).unwrap_err();
    assert!(matches!(error, ModelError::WrongInput { .. }) && error.to_string().contains("files in it"), "{error}");
    let under_a_file = saved.join("config.json/model");
    let error = model.save(&under_a_file, DType::F32, &Device::Cpu, None).unwrap_err();
    assert!(matches!(error, ModelError::Write { .. }), "{error}");
}
