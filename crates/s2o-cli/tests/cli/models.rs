//! Models that are broken, unsupported or too short, from either command line.

use std::fs;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use s2o_models::DecoderConfig;
use s2o_models::weights::synthetic;
use s2o_testkit::gguf;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_has, assert_misused, assert_refused, command, run, text};

/// needle-11m with a changed configuration.
fn model_directory(change: impl FnOnce(&mut Value)) -> TempDir {
    let directory = TempDir::new().expect("a temporary directory");
    s2o_needle_11m::write(directory.path()).expect("written");
    let mut config: Value = serde_json::from_str(s2o_needle_11m::CONFIG).expect("JSON");
    change(&mut config);
    fs::write(directory.path().join("config.json"), config.to_string()).expect("written");
    directory
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_gpus_says_so() {
    assert_refused("prefill", &[], &[(&["--device", "cuda"], "build with --features cuda")]);
}

#[test]
fn bad_models_are_refused() {
    let refused = |command: &str, model: &str, part: &str| assert_refused(command, &["--model", model], &[(&[], part)]);
    refused("prefill", "./no/such/directory", "./no/such/directory is missing: there is no such directory");
    refused("prefill", "models/mistyped", "there is no directory models/mistyped here");
    refused(
        "prefill",
        "x/model.safetensors",
        "`x/model.safetensors` is a file: expected the directory of a model, such as `x`",
    );
    let other = model_directory(|config| config["architectures"] = json!(["MambaForCausalLM"]));
    refused("prefill", text(other.path()), "`MambaForCausalLM` is not supported: expected LlamaForCausalLM");

    let long = model_directory(|config| config["hidden_act"] = json!("x".repeat(100_000)));
    let output = run("prefill", &["--model", text(long.path())]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.trim_end().ends_with("x ...") && stderr.len() < 2100, "{} bytes", stderr.len());

    let truncated = model_directory(|_| {});
    let weights = truncated.path().join("model.safetensors");
    let bytes = fs::read(&weights).expect("weights");
    fs::write(&weights, &bytes[..bytes.len() / 2]).expect("written");
    let (whole, half) = (bytes.len(), bytes.len() / 2);
    let part = format!("model.safetensors is not a valid weight file: expected {whole} bytes, got {half}\n");
    refused("compare", text(truncated.path()), &part);
    fs::remove_file(&weights).expect("removed");
    refused("prefill", text(truncated.path()), "model.safetensors is missing");
    let other = truncated.path().join("other.gguf");
    fs::write(&other, "PK\u{3}").expect("written");
    let part = r#"other.gguf is not a valid weight file: expected a file that begins with "GGUF", got "PK\x03""#;
    refused("prefill", text(&other), part);
}

#[test]
fn the_memory_of_dequantised_weights_is_said() {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 261, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": false, "eos_token_id": 257,
    });
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("model.gguf");
    let parsed = DecoderConfig::from_json(&config.to_string(), "test").expect("a configuration");
    let weights = synthetic::weights(&parsed, 1, &Device::Cpu).expect("weights");
    gguf::write(&file, &gguf::metadata("llama", &config), &gguf::tensors(&config, &weights, GgmlDType::Q8_0));

    let values: usize = weights.values().map(Tensor::elem_count).sum();
    let sentence = |bytes: usize| format!("the weights are dequantised and take {:.2} GB", bytes as f64 / 1e9);
    for (dtype, said) in [
        (&["--dtype", "f32"][..], Some(sentence(4 * values))),
        (&["--dtype", "f16"], Some(sentence(2 * values))),
        (&["--dtype", "gguf"], None),
        (&[], None),
    ] {
        let args =
            [&["--model", text(&file), "--cpu", "--prompt", "the", "--template", "none", "-n", "1"], dtype].concat();
        let output = run("prefill", &args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        match &said {
            Some(said) => assert!(stderr.contains(said), "{said} in {stderr}"),
            None => assert!(!stderr.contains("dequantised"), "{stderr}"),
        }
    }
}

/// needle-11m's tokenizer with the names of ChatML's special tokens.
#[test]
fn a_text_gets_the_models_chat_template() {
    let chat = model_directory(|_| {});
    let model = text(chat.path());
    let tokenizer = s2o_needle_11m::TOKENIZER.replace("<|bos|>", "<|im_start|>").replace("<|eos|>", "<|im_end|>");
    fs::write(chat.path().join("tokenizer.json"), tokenizer).expect("written");
    let run = |args: &[&str]| crate::stdout_of("prefill", &[&["--model", model, "-n", "1"], args].concat());
    let tokens = |args: &[&str]| -> Value {
        let object: Value = serde_json::from_str(&run(&[args, &["--json"]].concat())).expect("one JSON object");
        object["tokens"].clone()
    };
    let whole = "<|im_start|>user\nWhat is a tensor?<|im_end|>\n<|im_start|>assistant\n";
    let asked = ["--prompt", "What is a tensor?"];
    let templated = tokens(&asked).as_u64().expect("a number");
    // Bare texts get the tokenizer's own start token in addition.
    assert_eq!(tokens(&["--template", "none", "--prompt", whole]), templated + 1);
    assert!(tokens(&[&asked[..], &["--template", "none"]].concat()).as_u64() < Some(templated));
    assert_has(&run(&asked), &["tokens, template chat-ml (auto)"]);

    let file = chat.path().join("template");
    fs::write(&file, whole.replace("What is a tensor?", "{prompt}")).expect("written");
    assert_eq!(tokens(&[&asked[..], &["--template", text(&file)]].concat()), templated);
    fs::write(&file, "no place").expect("written");
    let base = ["--prompt", "What?", "--template"];
    let nowhere = format!("--template {}: expected {{prompt}} once, got it 0 times", file.display());
    assert_refused(
        "prefill",
        &base,
        &[
            (&[text(&file)], &nowhere),
            (&["llama3"], "expected one with <|begin_of_text|>, for llama3, got one without"),
        ],
    );
    assert_misused("prefill", &[&["--prompt", "What?", "--template", "llama7"], &["--passkey", "--template", "none"]]);
}

#[test]
fn a_model_in_the_hubs_cache_needs_no_network() {
    let files = model_directory(|_| {});
    let home = TempDir::new().expect("a temporary directory");
    let repository = home.path().join("hub/models--org--needle");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    for directory in ["refs".to_owned(), format!("snapshots/{commit}")] {
        fs::create_dir_all(repository.join(directory)).expect("made");
    }
    fs::write(repository.join("refs/main"), commit).expect("written");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(files.path().join(file), repository.join("snapshots").join(commit).join(file)).expect("copied");
    }
    let prefill = |variable: &str, value: &Path, model: &str| {
        let mut command = command("prefill");
        // No server listens there, so a request would fail the run.
        command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", "http://127.0.0.1:9").env(variable, value);
        let args = ["--model", model, "--context", "300", "--attention", "dense", "--json"];
        let output = command.args(args).output().expect("the program starts");
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (variable, value) in [("HF_HOME", home.path().to_owned()), ("HF_HUB_CACHE", home.path().join("hub"))] {
        let (stdout, stderr) = prefill(variable, &value, "org/needle");
        let object: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{variable}: {stderr}"));
        assert_eq!((&object["model"], &object["answer_dense"]), (&json!("needle"), &object["expected"]));
    }
    let (_, stderr) = prefill("HF_HOME", home.path(), "org/other");
    assert_has(&stderr, &["cannot reach config.json of org/other at revision main on http://127.0.0.1:9"]);
}

#[test]
fn the_flags_of_candles_examples_choose_a_model() {
    let own = model_directory(|_| {});
    let args = ["--model-id", text(own.path()), "--context", "300", "-n", "1", "--use-flash-attn", "--cpu", "--json"];
    let object = &crate::rows_of("prefill", &args)[0];
    assert_eq!(object["model"], text(own.path().file_name().expect("a name").as_ref()));
    assert!(object["seconds_dense"].is_number() && object["seconds_s2o"].is_null(), "{object}");
}

#[test]
fn values_that_are_not_finite_name_their_layer() {
    let broken = model_directory(|_| {});
    let path = broken.path().join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).expect("weights");
    let norm = weights.get_mut("model.layers.3.input_layernorm.weight").expect("a norm");
    *norm = norm.affine(f64::NAN, 0.0).expect("a tensor");
    candle_core::safetensors::save(&weights, &path).expect("saved");
    let out = broken.path().join("out");
    let save = out.with_extension("json");
    let prompt = ["--context", "600"];
    let evaluated = ["run", "--lengths", "600", "--items", "1", "--out", text(&out), "--tasks"];
    let part = "the keys and values of layer 3 are the first that are not finite";
    for (command, args) in [
        ("prefill", &prompt[..]),
        ("compare", &prompt),
        ("statistics", &prompt),
        ("evaluate", &[&evaluated[..], &["passkey"]].concat()),
        ("evaluate", &[&evaluated[..], &["perplexity", "--last", "100"]].concat()),
        ("evaluate", &["tune", "--max-rel-l1", "0.1", "--lengths", "600", "--dense-below", "0", "--save", text(&save)]),
    ] {
        assert_refused(command, args, &[(&["--model", text(broken.path())], part)]);
    }
    assert!(!save.exists());
}

#[test]
fn the_models_context_is_the_limit() {
    let short = model_directory(|config| config["max_position_embeddings"] = json!(512));
    let model = text(short.path());
    for command in ["prefill", "compare"] {
        for part in ["--context: expected at most 512, the positions of", ", got 1024\n"] {
            assert_refused(command, &["--model", model], &[(&["--context", "1024"], part)]);
        }
    }

    // A file is cut in the middle, and no more tokens are generated than the context has room for.
    let file = short.path().join("prompt.txt");
    fs::write(&file, "The quick brown fox jumps over the lazy dog. ".repeat(200)).expect("written");
    let output = run("prefill", &["--model", model, "--prompt-file", text(&file), "--context", "511", "--json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_has(&stderr, &["the first 256 and the last 255 are kept (--context 511)", "generating at most 2 tokens"]);
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(object["tokens"], 511);
}
