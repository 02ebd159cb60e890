//! Synthetic models from either command line: labels, times and errors.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_has, assert_misused, assert_refused, rows_of, stdout_of, text};

/// The `config.json` of a model that is fast to make.
fn shape() -> (TempDir, String) {
    let directory = TempDir::new().expect("a temporary directory");
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192,
    });
    let path = directory.path().join("tiny.json");
    fs::write(&path, config.to_string()).expect("written");
    let path = text(&path).to_owned();
    (directory, path)
}

#[test]
fn prefill_times_a_synthetic_model() {
    let (_directory, shape) = shape();
    let args = ["--synthetic", &shape, "--tokens", "3000", "-n", "3"];
    let object = &rows_of("prefill", &[&args[..], &["--json"]].concat())[0];
    assert_eq!((&object["model"], &object["tokens"]), (&json!("synthetic-tiny-calibrated"), &json!(3000)));
    assert!(object["seconds_dense"].is_number() && object["seconds_s2o"].is_number(), "{object}");
    assert!((0.05..1.0).contains(&object["density"].as_f64().expect("a density")), "{object}");
    assert_eq!(object["expected"], Value::Null);
    // The generated text is token numbers.
    let answer = object["answer_dense"].as_str().expect("an answer");
    assert_eq!(answer.split(' ').filter(|id| id.parse::<u32>().is_ok()).count(), 3, "{answer}");

    let report = stdout_of("prefill", &args);
    let model = "model   synthetic-tiny-calibrated: Llama";
    assert_has(&report, &[model, "SYNTHETIC: made-up weights", "3000 random tokens", "speed-up"]);
    assert!(!stdout_of("prefill", &["--context", "500", "-n", "1"]).contains("SYNTHETIC"));

    let focused = &rows_of("prefill", &[&args[..], &["--json", "--synthetic-focus", "2"]].concat())[0];
    assert_eq!(focused["model"], "synthetic-tiny-focus-2");
    assert!(focused["density"].as_f64() < object["density"].as_f64(), "{focused} {object}");
}

#[test]
fn a_focus_out_of_range_is_refused() {
    let cases: &[(&[&str], &str)] =
        &[(&["--synthetic-focus", "-1"], "--synthetic-focus: expected a number from 0 to 4, got -1")];
    assert_refused("prefill", &["--synthetic", "llama-3.1-8b"], cases);
}

#[test]
fn a_saved_model_loads_as_a_directory() {
    let (directory, shape) = shape();
    let saved = directory.path().join("saved");
    let said = stdout_of("prefill", &["--synthetic", &shape, "--save", text(&saved)]);
    assert_has(&said, &["synthetic-tiny-calibrated", "GB of weights in bf16"]);
    let args = ["--model", text(&saved), "--tokens", "300", "-n", "1", "--attention", "dense", "--json"];
    assert_eq!(rows_of("prefill", &args)[0]["tokens"], 300);
    let tokenizer = std::fs::read_to_string(saved.join("tokenizer.json")).unwrap();
    assert!(tokenizer.contains(r#""decoder":{"type":"ByteLevel""#), "mistral.rs needs a decoder of bytes");
    assert_refused("prefill", &["--synthetic", &shape, "--save"], &[(&[text(&saved)], "a new or an empty one")]);
    assert_misused("prefill", &[&["--save", "elsewhere"]]);
}

#[test]
fn a_saved_model_is_evaluated_and_reported() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = |name: &str| text(&directory.path().join(name)).to_owned();
    let (shape, saved, run, report) = (path("tiny.json"), path("saved"), path("run"), path("report"));
    // As many tokens as the tokenizer has.
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "eos_token_id": 1,
    });
    fs::write(&shape, config.to_string()).expect("written");
    stdout_of("prefill", &["--synthetic", &shape, "--save", &saved]);
    fs::write(directory.path().join("saved/tokenizer.json"), s2o_needle_11m::TOKENIZER).expect("written");
    let tasks = ["--tasks", "passkey,vt", "--lengths", "2048", "--items", "1", "--methods", "dense,s2o:dense-below=0"];
    let args = [&["run", "--model", &saved, "--out", &run][..], &tasks].concat();
    assert_has(&stdout_of("evaluate", &args), &["passkey", "vt", "s2o:dense-below=0"]);
    stdout_of("evaluate", &["report", &run, "--out", &report]);
    let page = fs::read_to_string(directory.path().join("report/report.md")).expect("a report");
    assert_has(&page, &["# saved: exact and sparse attention", "s2o:dense-below=0", "score-by-length.png"]);
    assert!(directory.path().join("report/score-by-length.png").is_file());
}

#[test]
fn compare_says_that_a_model_is_synthetic() {
    let (_directory, shape) = shape();
    let args = ["--synthetic", &shape, "--synthetic-weights", "random", "--tokens", "2500", "--layers", "1"];
    let table = stdout_of("compare", &args);
    assert_has(&table, &["synthetic-tiny-random", "2500 random tokens"]);
}

#[test]
fn random_tokens_suit_any_model() {
    let args = ["--tokens", "300", "-n", "1", "--attention", "dense", "--json"];
    let object = &rows_of("prefill", &args)[0];
    assert_eq!((&object["model"], &object["tokens"]), (&json!("needle-11m"), &json!(300)));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (_directory, shape) = shape();
    let cases: &[(&[&str], &str)] = &[
        (&["--synthetic", "llama-4"], "`llama-4` is no shape of a synthetic model: expected `llama-3.1-8b`"),
        (&["--synthetic", "nowhere.json"], "nowhere.json is missing"),
        (&["--synthetic", &shape, "--synthetic-focus", "5"], "expected a number from 0 to 4, got 5"),
        (
            &["--synthetic", &shape, "--synthetic-weights", "random", "--synthetic-focus", "1"],
            "expected calibrated weights, got 1 for random ones",
        ),
        (&["--synthetic", &shape, "--passkey"], "expected a model that reads text, got synthetic-tiny-calibrated"),
        (&["--synthetic", &shape, "--prompt", "What is"], "a synthetic model reads the numbers of its tokens"),
        (
            &["--synthetic", &shape, "--tokens", "9000"],
            "--tokens: expected at most 8192, the positions of synthetic-tiny-calibrated, got 9000",
        ),
        (&["--synthetic", &shape, "--tokens", "0"], "--tokens: expected at least 1 token, got 0"),
    ];
    assert_refused("prefill", &[], cases);
    let other = ["--synthetic", &shape, "--model", "needle-11m"];
    assert_misused("prefill", &[&other, &["--synthetic-focus", "1"], &["--tokens", "9", "--prompt", "a"]]);
}
