//! Compares GGUF files written here with the same weights read from safetensors.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_s2o::Dense;
use s2o_models::{KvCache, LoadOptions, LoadedModel, ModelError, ModelSource, PrefillOptions};
use s2o_testkit::gguf::{metadata, tensors, write};
use serde_json::json;

use crate::fixtures::*;

fn load(path: &Path, dtype: DType) -> LoadedModel {
    let source: ModelSource = path.to_str().unwrap().parse().unwrap();
    source.load(&LoadOptions { dtype: Some(dtype), ..Default::default() }, None).unwrap()
}

fn logits(model: &LoadedModel) -> Tensor {
    let mut cache = model.decoder.new_cache(1, 100).unwrap();
    let options = PrefillOptions::new().num_logits(5);
    model.decoder.prefill(&tokens(1, 90, 261), &mut cache, &Dense, options).unwrap().logits
}

#[test]
fn logits_equal_those_of_the_safetensors() {
    for (architecture, json) in [
        ("llama", with(llama_json(), json!({"rms_norm_eps": 2f64.powi(-17)}))),
        ("llama", with(llama_json(), json!({"rms_norm_eps": 2f64.powi(-17), "tie_word_embeddings": true}))),
        ("qwen3", with(qwen3_json(), json!({"rms_norm_eps": 2f64.powi(-20)}))),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let weights = weights(&json, 31);
        write_directory(directory.path(), &json, &weights);
        let reference = load(directory.path(), DType::F32);
        let expected = logits(&reference);

        let file = directory.path().join("tiny.gguf");
        write(&file, &metadata(architecture, &json), &tensors(&json, &weights, GgmlDType::F32));
        let model = load(&file, DType::F32);
        assert_eq!(model.name, "tiny");
        let source: ModelSource = file.to_str().unwrap().parse().unwrap();
        let bytes = |dtype| source.dequantised_bytes(&LoadOptions { dtype, ..Default::default() }).unwrap();
        let elements: u64 = weights.values().map(|weight| weight.elem_count() as u64).sum();
        let expected_bytes = (None, Some(4 * elements), Some(2 * elements));
        assert_eq!((bytes(None), bytes(Some(DType::F32)), bytes(Some(DType::BF16))), expected_bytes);
        assert_eq!(ModelSource::Embedded.dequantised_bytes(&LoadOptions::default()).unwrap(), None);
        assert_eq!(model.config(), reference.config());
        assert_eq!(max_diff(&logits(&model), &expected), 0.0, "{architecture} in F32");
        assert_eq!(model.eos_ids, [257, 258], "the file's own, and a known end of turn");

        write(&file, &metadata(architecture, &json), &tensors(&json, &weights, GgmlDType::Q8_0));
        let difference = max_diff(&logits(&load(&file, DType::F32)), &expected);
        assert!(difference > 0.0 && difference < 0.06 * max_abs(&expected), "{architecture} in Q8_0: {difference}");
    }
}

/// With many rows the values are those of the dequantised weights; up to 8 rows the inputs are rounded to 8 bits.
#[test]
fn matrices_stay_quantised_on_a_cpu_unless_a_dtype_is_given() {
    for (architecture, json) in [
        ("llama", llama_json()),
        ("llama", with(llama_json(), json!({"tie_word_embeddings": true}))),
        ("llama", with(llama_json(), json!({"attention_bias": true, "mlp_bias": true}))),
        ("qwen3", qwen3_json()),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tiny.gguf");
        write(&file, &metadata(architecture, &json), &tensors(&json, &weights(&json, 35), GgmlDType::Q4_0));
        let dequantised = load(&file, DType::F32);
        let source = ModelSource::Gguf(file);
        let half = LoadOptions { dtype: Some(DType::BF16), keep_quantised: Some(true), ..Default::default() };
        assert_eq!(source.load(&half, None).unwrap().decoder.precision(), "bf16 with Q4_0 weights");
        let never = LoadOptions { keep_quantised: Some(false), ..Default::default() };
        assert_eq!(source.load(&never, None).unwrap().decoder.precision(), "f32");
        let quantised = source.load(&LoadOptions::default(), None).unwrap();
        assert_eq!(quantised.decoder.precision(), "f32 with Q4_0 weights");
        assert_eq!(dequantised.decoder.precision(), "f32");

        let prefilled = |model: &LoadedModel, len: usize, num_logits: usize| {
            let mut cache = model.decoder.new_cache(1, 100).unwrap();
            let options = PrefillOptions::new().num_logits(num_logits);
            (model.decoder.prefill(&tokens(1, len, 261), &mut cache, &Dense, options).unwrap().logits, cache)
        };
        let (want, mut want_cache) = prefilled(&dequantised, 90, 9);
        let (got, mut cache) = prefilled(&quantised, 90, 9);
        assert_eq!(max_diff(&got, &want), 0.0, "{architecture}");
        let close = |got: &Tensor, want: &Tensor| {
            let difference = max_diff(got, want);
            assert!(difference > 0.0 && difference < 0.03 * max_abs(want), "{architecture}: {difference}");
        };
        let (got, want) = (prefilled(&quantised, 8, 1).0, prefilled(&dequantised, 8, 1).0);
        close(&got, &want);
        let token = tokens(1, 1, 261);
        let decode = |model: &LoadedModel, cache: &mut KvCache| model.decoder.decode(&token, cache).unwrap();
        close(&decode(&quantised, &mut cache), &decode(&dequantised, &mut want_cache));
    }
}

#[test]
fn its_tokenizer_is_the_directorys() {
    let directory = tempfile::tempdir().unwrap();
    let (json, file) = (llama_json(), directory.path().join("tiny.gguf"));
    let weights = weights(&json, 32);
    write_directory(directory.path(), &json, &weights);
    let mut metadata = metadata("llama", &json);
    write(&file, &metadata, &tensors(&json, &weights, GgmlDType::F32));
    let (model, reference) = (load(&file, DType::F32), load(directory.path(), DType::F32));
    for text in ["the theory of 12345", " two  spaces\n\n\tand a tab", "naïve 日本語 🦀", "<|bos|>the<|im_end|>", ""]
    {
        let ids = model.encode(text).unwrap();
        assert_eq!(ids, reference.encode(text).unwrap(), "{text:?}");
        assert_eq!(model.tokenizer.decode(&ids, false).unwrap(), text);
    }
    assert_eq!(model.encode("the<|bos|>").unwrap(), [260, 256]);
    metadata.push(("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(true)));
    write(&file, &metadata, &tensors(&json, &weights, GgmlDType::F32));
    assert_eq!(load(&file, DType::F32).encode("the").unwrap(), [256, 260]);
}

#[test]
fn sentencepiece_vocabularies_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spm.gguf");
    let json = llama_json();
    let mut entries: Vec<(String, f32, i32)> =
        [("<unk>", 2), ("<s>", 3), ("</s>", 3)].map(|(text, kind)| (text.to_owned(), 0.0, kind)).to_vec();
    entries.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    let pieces = ["▁he", "ll", "he", "llo", "▁", "h", "e", "l", "o"];
    entries.extend(pieces.iter().enumerate().map(|(i, text)| ((*text).to_owned(), -(i as f32), 1)));
    let mut metadata = metadata("llama", &json);
    metadata.retain(|(key, _)| !key.starts_with("tokenizer."));
    let list = |pick: &dyn Fn(&(String, f32, i32)) -> Value| Value::Array(entries.iter().map(pick).collect());
    let spm = [
        ("model", Value::String("llama".to_owned())),
        ("tokens", list(&|entry| Value::String(entry.0.clone()))),
        ("scores", list(&|entry| Value::F32(entry.1))),
        ("token_type", list(&|entry| Value::I32(entry.2))),
        ("bos_token_id", Value::U32(1)),
        ("eos_token_id", Value::U32(2)),
    ];
    metadata.extend(spm.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)));
    let tensors = tensors(&json, &weights(&json, 62), GgmlDType::F32);
    write(&path, &metadata, &tensors);
    let model = load(&path, DType::F32);
    assert_eq!(model.eos_ids, [2]);
    let ids = model.encode("hello 🦀").unwrap();
    let tokens: Vec<String> = ids.iter().map(|id| model.tokenizer.id_to_token(*id).unwrap()).collect();
    assert_eq!(tokens, ["<s>", "▁he", "llo", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"]);
    assert_eq!(model.decode_text(&ids).unwrap(), "hello 🦀");

    metadata.retain(|(key, _)| key != "tokenizer.ggml.scores");
    write(&path, &metadata, &tensors);
    let error = ModelSource::Gguf(path).load(&LoadOptions::default(), None).unwrap_err();
    assert!(matches!(&error, ModelError::Tokenizer { reason } if reason.contains("scores: expected 268")), "{error}");
}

#[test]
fn rope_freqs_divide_the_frequencies() {
    let json = llama_json();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tiny.gguf");
    let weights = weights(&json, 33);
    let mut tensors = tensors(&json, &weights, GgmlDType::F32);
    let divisors: Vec<f32> = (0..8).map(|i| if i < 4 { 1.0 } else { 8.0 }).collect();
    let divisors = Tensor::from_vec(divisors, 8, &Device::Cpu).unwrap();
    tensors.push(("rope_freqs.weight".to_owned(), QTensor::quantize(&divisors, GgmlDType::F32).unwrap()));
    write(&file, &metadata("llama", &json), &tensors);
    let frequencies = load(&file, DType::F32).config().rope.inverse_frequencies(16);
    let plain = config(&json).rope.inverse_frequencies(16);
    for i in 0..8 {
        let expected = if i < 4 { plain[i] } else { plain[i] / 8.0 };
        assert!((frequencies[i] / expected - 1.0).abs() < 1e-6);
    }
}

#[test]
fn broken_files_are_typed_errors() {
    let json = llama_json();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tiny.gguf");
    let weights = weights(&json, 34);
    let good_metadata = metadata("llama", &json);
    let error = || ModelSource::Gguf(file.clone()).load(&LoadOptions::default(), None).unwrap_err();
    assert!(matches!(error(), ModelError::MissingFile { .. }));

    let tensors = || tensors(&json, &weights, GgmlDType::F32);
    write(&file, &good_metadata, &tensors());
    let bytes = std::fs::read(&file).unwrap();
    for len in [0, 3, 100, bytes.len() / 2, bytes.len() - 40] {
        std::fs::write(&file, &bytes[..len]).unwrap();
        assert!(matches!(error(), ModelError::InvalidWeights { .. }), "cut to {len} bytes: {}", error());
    }
    write(&file, &metadata("gpt2", &json), &tensors());
    assert!(matches!(error(), ModelError::UnsupportedArchitecture { got, .. } if got == "gpt2"));

    let mut fewer = tensors();
    fewer.retain(|(name, _)| name != "blk.1.attn_k.weight");
    write(&file, &good_metadata, &fewer);
    assert!(matches!(error(), ModelError::MissingTensor { name } if name == "blk.1.attn_k.weight"));

    let mut more = tensors();
    let bias = Tensor::ones(64, DType::F32, &Device::Cpu).unwrap();
    more.push(("blk.1.attn_q.bias".to_owned(), QTensor::quantize(&bias, GgmlDType::F32).unwrap()));
    write(&file, &good_metadata, &more);
    assert!(error().to_string().contains("tensor `blk.1.attn_q.bias`: expected only"), "{}", error());

    let mut wrong = tensors();
    wrong.retain(|(name, _)| name != "output_norm.weight");
    let short = Tensor::ones(32, DType::F32, &Device::Cpu).unwrap();
    wrong.push(("output_norm.weight".to_owned(), QTensor::quantize(&short, GgmlDType::F32).unwrap()));
    write(&file, &good_metadata, &wrong);
    assert!(matches!(error(), ModelError::WrongShape { expected, got, .. } if expected == [64] && got == [32]));

    let mut foreign = good_metadata;
    foreign.iter_mut().find(|(key, _)| key == "tokenizer.ggml.model").unwrap().1 = Value::String("bert".to_owned());
    write(&file, &foreign, &tensors());
    assert!(matches!(error(), ModelError::UnsupportedFeature { feature: "tokenizer.ggml.model", .. }));
    let tokenizer = directory.path().join("tokenizer.json");
    tiny_tokenizer().save(&tokenizer, false).unwrap();
    let options = LoadOptions { tokenizer: Some(tokenizer), ..Default::default() };
    assert!(ModelSource::Gguf(file.clone()).load(&options, None).is_ok(), "a tokenizer.json helps");
}

/// Where the type (u32) and the offset (u64) of a tensor are in a file.
fn type_at(bytes: &[u8], tensor: &str) -> usize {
    let end = tensor.len() + bytes.windows(tensor.len()).position(|part| part == tensor.as_bytes()).unwrap();
    end + 4 + 8 * usize::from(bytes[end])
}

#[test]
fn tensors_that_do_not_fill_the_data_are_refused() {
    let (json, directory) = (llama_json(), tempfile::tempdir().unwrap());
    let file = directory.path().join("tiny.gguf");
    write(&file, &metadata("llama", &json), &tensors(&json, &weights(&json, 35), GgmlDType::F32));
    let bytes = std::fs::read(&file).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        match ModelSource::Gguf(file.clone()).load(&LoadOptions::default(), None).unwrap_err() {
            ModelError::InvalidWeights { reason, .. } => reason,
            other => panic!("{other}"),
        }
    };
    let tensor = "blk.0.attn_q.weight";
    let offset_at = type_at(&bytes, tensor) + 4;
    let offset = u64::from_le_bytes(bytes[offset_at..offset_at + 8].try_into().unwrap());
    // Misaligned, and over the next tensor.
    for got in [offset + 4, offset + 32] {
        let mut moved = bytes.clone();
        moved[offset_at..offset_at + 8].copy_from_slice(&got.to_le_bytes());
        let expected = format!("tensor `{tensor}` is at byte {got} of the data, expected byte {offset}: ");
        assert!(refused(&moved).starts_with(&expected), "{}", refused(&moved));
    }
    // F16 leaves the second half of the data over, wherever the tensor is.
    let mut smaller = bytes.clone();
    smaller[offset_at - 4] = 1;
    let reason = refused(&smaller);
    assert!(
        reason.contains("of the data, expected byte") || reason.contains("bytes, which the tensors fill"),
        "{reason}"
    );
    assert!(refused(&[&bytes[..], &[0; 32]].concat()).contains("bytes, which the tensors fill"));
    assert_eq!(refused(&[]), "the file is empty");

    let mut unaligned = metadata("llama", &json);
    unaligned.push(("general.alignment".to_owned(), Value::U32(0)));
    write(&file, &unaligned, &tensors(&json, &weights(&json, 35), GgmlDType::F32));
    assert_eq!(refused(&std::fs::read(&file).unwrap()), "general.alignment: expected at least 1, got 0");
}

#[test]
fn impossible_metadata_is_refused() {
    let (json, directory) = (llama_json(), tempfile::tempdir().unwrap());
    let file = directory.path().join("tiny.gguf");
    let tensors = tensors(&json, &weights(&json, 36), GgmlDType::F32);
    for (key, value, expected) in [
        ("block_count", Value::U32(u32::MAX), "num_hidden_layers is 4294967295, expected at most 1024"),
        ("rope.freq_base", Value::F32(1e-30), "rope_theta is 0.00000000000000000000000000000"),
        ("rope.freq_base", Value::String("1e6".to_owned()), "llama.rope.freq_base: expected a number, got String"),
        ("rope.scaling.type", Value::U32(1), "llama.rope.scaling.type: expected a name, got U32"),
        ("attention.head_count_kv", Value::Array(vec![Value::U32(2)]), "head_count_kv: expected a number, got Array"),
    ] {
        let mut metadata = metadata("llama", &json);
        let key = format!("llama.{key}");
        metadata.retain(|(there, _)| *there != key);
        metadata.push((key, value));
        write(&file, &metadata, &tensors);
        let error = ModelSource::Gguf(file.clone()).load(&LoadOptions::default(), None).unwrap_err();
        assert!(matches!(error, ModelError::InvalidConfig { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
