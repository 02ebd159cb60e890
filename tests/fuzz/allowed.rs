//! What a mutated file may be read as: no reader can know that another number or text in these places is wrong.

use std::io::Cursor;

use candle_core::quantized::gguf_file::Content;
use serde_json::Value;

use crate::mutation::Format;

/// File, places of [`changes`] with what is below them, and the reason.
const MAY_DIFFER: &[(&str, &[&str], &str)] = &[
    (
        "config.json",
        &["/rms_norm_eps", "/rope_theta", "/rope_scaling"],
        "constants of the computation that no tensor tells",
    ),
    ("config.json", &["/tie_word_embeddings"], "the embedding is a head of the right shape"),
    ("config.json", &["/eos_token_id"], "any token may end a text"),
    ("generation_config.json", &["/eos_token_id"], "any token may end a text"),
    (
        "tokenizer.json",
        &["/added_tokens", "/normalizer", "/pre_tokenizer", "/post_processor", "/model"],
        "other rules give other tokens, all of them valid",
    ),
    ("model.safetensors", &["/data"], "weights have no checksum"),
    ("model.gguf", &["/data"], "weights have no checksum"),
    (
        "model.gguf",
        &["/llama.attention.layer_norm_rms_epsilon", "/llama.rope.freq_base"],
        "constants of the computation that no tensor tells",
    ),
    (
        "model.gguf",
        &[
            "/tokenizer.ggml.tokens",
            "/tokenizer.ggml.merges",
            "/tokenizer.ggml.token_type",
            "/tokenizer.ggml.pre",
            "/tokenizer.ggml.bos_token_id",
            "/tokenizer.ggml.eos_token_id",
        ],
        "other rules give other tokens, all of them valid",
    ),
    (
        "vt/validation.jsonl",
        &["/index", "/input", "/outputs", "/length", "/answer_prefix", RECORDS],
        "texts and names of a benchmark",
    ),
    (
        "data.json",
        &["/*/_id", "/*/domain", "/*/sub_domain", "/*/difficulty", "/*/length", "/*/question", "/*/context"],
        "texts and names of a benchmark",
    ),
    (
        "data.json",
        &["/*/choice_A", "/*/choice_B", "/*/choice_C", "/*/choice_D", "/*/answer", RECORDS],
        "texts and names of a benchmark",
    ),
    ("passkey.jsonl", &["/id", "/context", "/input", "/answer", "/options", RECORDS], "texts and names of a benchmark"),
    (
        "outcomes.jsonl",
        &["/sample", "/method", "/model", "/dtype", "/device", "/template", "/chunk", "/digest", "/task", "/groups"],
        "a journal has no checksum",
    ),
    (
        "outcomes.jsonl",
        &["/context_tokens", "/depth", "/index", "/seed", "/prompt_tokens", "/density", "/layer_density", RECORDS],
        "a journal has no checksum",
    ),
    (
        "outcomes.jsonl",
        &["/prefill_seconds", "/kind", "/prediction", "/references", "/score"],
        "a journal has no checksum",
    ),
];

/// The number of records of a file, which is nowhere else.
const RECORDS: &str = "/#";

/// The places of `mutated` that are not as in the original and that must be, if it is read as something else: all
/// changes, if none of them may be.
pub fn forbidden(file: &str, format: Format, original: &[u8], mutated: &[u8]) -> Vec<String> {
    let changes = changes(format, original, mutated);
    // It is read differently, so something has changed.
    if changes.is_empty() {
        return vec!["nothing that is known to be read".to_owned()];
    }
    changes.into_iter().filter(|place| !is_allowed(file, place)).collect()
}

/// The mutated JSON object with its changes in allowed places undone. Only these changes made it differ if it is read as
/// the original: the others have no effect, as of a key that is gone and has a default.
pub fn without_allowed(file: &str, original: &[u8], mutated: &[u8]) -> Option<Vec<u8>> {
    let (Value::Object(before), Value::Object(mut after)) = (json(original), json(mutated)) else { return None };
    after.extend(before.into_iter().filter(|(key, _)| is_allowed(file, &format!("/{key}"))));
    Some(Value::Object(after).to_string().into_bytes())
}

fn is_allowed(file: &str, place: &str) -> bool {
    let places = MAY_DIFFER.iter().filter(|(name, ..)| *name == file).flat_map(|(_, places, _)| *places);
    let is_below =
        |above: &&str| place.strip_prefix(*above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    places.into_iter().any(is_below)
}

/// The places of the original that are changed or gone. `*` stands for every index of a list.
fn changes(format: Format, original: &[u8], mutated: &[u8]) -> Vec<String> {
    let mut places = Vec::new();
    match format {
        Format::Json => compare(&json(original), &json(mutated), String::new(), &mut places),
        Format::JsonLines => {
            let [before, after] = [original, mutated].map(|bytes| {
                let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
                lines.map(json).collect::<Vec<Value>>()
            });
            let is_same = before.len() == after.len();
            if !is_same {
                places.push(RECORDS.to_owned());
            }
            // Of a file with more or fewer lines the known ones may be anywhere.
            let old = before.iter().filter(|line| is_same || !after.contains(line));
            let new = after.iter().filter(|line| is_same || !before.contains(line));
            for (line, new) in old.zip(new) {
                match new {
                    // A line that is no JSON, which a journal drops at its end.
                    Value::Null => places.push(RECORDS.to_owned()),
                    new => compare(line, new, String::new(), &mut places),
                }
            }
        }
        Format::Safetensors => {
            let [before, after] = [original, mutated].map(|bytes| {
                let (length, rest) = bytes.split_first_chunk().expect("a length");
                rest.split_at(u64::from_le_bytes(*length) as usize)
            });
            compare(&json(before.0), &json(after.0), String::new(), &mut places);
            if before.1 != after.1 {
                places.push("/data".to_owned());
            }
        }
        Format::Binary => {
            let [before, after] =
                [original, mutated].map(|bytes| Content::read(&mut Cursor::new(bytes)).expect("read"));
            for (key, value) in &before.metadata {
                if after.metadata.get(key).is_none_or(|other| format!("{other:?}") != format!("{value:?}")) {
                    places.push(format!("/{key}"));
                }
            }
            for (name, info) in &before.tensor_infos {
                if after.tensor_infos.get(name).is_none_or(|other| format!("{other:?}") != format!("{info:?}")) {
                    places.push(format!("/tensors/{name}"));
                }
            }
            let data = |content: &Content, bytes: &[u8]| bytes[content.tensor_data_offset as usize..].to_vec();
            if data(&before, original) != data(&after, mutated) {
                places.push("/data".to_owned());
            }
        }
    }
    places
}

/// `null` for what is no JSON.
fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}

fn compare(before: &Value, after: &Value, place: String, places: &mut Vec<String>) {
    match (before, after) {
        _ if before == after => {}
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                // A key that is gone is not `null`: that would be the same as a `null` that was there.
                match after.get(key) {
                    Some(other) => compare(value, other, format!("{place}/{key}"), places),
                    None => places.push(format!("{place}/{key}")),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            for (value, other) in before.iter().zip(after) {
                compare(value, other, format!("{place}/*"), places);
            }
        }
        (Value::Array(_), Value::Array(_)) => places.push(format!("{place}{RECORDS}")),
        _ => places.push(place),
    }
}

/// Only what is in the list may differ.
pub fn check() {
    let forbidden =
        |file, before: &str, after: &str| forbidden(file, Format::Json, before.as_bytes(), after.as_bytes()).join(" ");
    let config = r#"{"rope_theta": 1, "rope_scaling": {"factor": 8}, "hidden_act": "silu"}"#;
    assert_eq!(forbidden("config.json", config, &config.replace('8', "9")), "");
    assert_eq!(forbidden("config.json", config, &config.replace("silu", "gelu")), "/hidden_act");
    assert_eq!(forbidden("config.json", config, &config.replace("hidden_act", "act")), "/hidden_act");
    assert_eq!(forbidden("generation_config.json", config, &config.replace('1', "2")), "/rope_theta");
    assert_ne!(forbidden("config.json", config, config), "");
    let list = r#"[{"answer": "A", "answers": 1}]"#;
    assert_eq!(forbidden("data.json", list, &list.replace('A', "B")), "");
    assert_eq!(forbidden("data.json", list, &list.replace('1', "2")), "/*/answers");
    assert_eq!(forbidden("data.json", list, "[]"), "");
}
