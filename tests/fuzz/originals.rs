//! The files that are mutated: a tiny model in both formats, three benchmarks' files, and a journal.

use std::fs;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use s2o_eval::run::{Journal, Key, Outcome, SampleResult, Setting};
use s2o_eval::tasks::ChatTemplate;
use s2o_testkit::gguf;
use serde_json::json;

use crate::fixtures::{llama_json, qwen3_json, weights, with, write_directory, write_sharded};
use crate::mutation::Format;

/// A file in a directory of the files that are read together.
pub struct Original {
    /// Directory.
    pub name: &'static str,
    /// File in the directory.
    pub file: &'static str,
    pub format: Format,
    /// Kind of the reader.
    pub kind: &'static str,
}

const ORIGINALS: &[Original] = &[
    Original { name: "llama", file: "config.json", format: Format::Json, kind: "model" },
    Original { name: "qwen3", file: "config.json", format: Format::Json, kind: "model" },
    Original { name: "llama", file: "tokenizer.json", format: Format::Json, kind: "model" },
    Original { name: "llama", file: "model.safetensors", format: Format::Safetensors, kind: "model" },
    Original { name: "llama", file: "generation_config.json", format: Format::Json, kind: "model" },
    Original { name: "sharded", file: "model.safetensors.index.json", format: Format::Json, kind: "model" },
    Original { name: "gguf", file: "model.gguf", format: Format::Binary, kind: "model" },
    Original { name: "ruler", file: "vt/validation.jsonl", format: Format::JsonLines, kind: "ruler" },
    Original { name: "longbench", file: "data.json", format: Format::Json, kind: "longbench" },
    Original { name: "infinitebench", file: "passkey.jsonl", format: Format::JsonLines, kind: "infinitebench" },
    Original { name: "journal", file: "outcomes.jsonl", format: Format::JsonLines, kind: "journal" },
];

impl Original {
    pub fn bytes(&self, directory: &Path) -> Vec<u8> {
        fs::read(directory.join(self.name).join(self.file)).expect("an original")
    }

    /// Copies the original's directory to `place`, with `bytes` as the mutated file.
    pub fn write_mutated(&self, directory: &Path, place: &Path, bytes: &[u8]) {
        let path = place.join(self.file);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        for entry in fs::read_dir(directory.join(self.name)).expect("a directory") {
            let from = entry.expect("an entry").path();
            if from.is_file() {
                fs::copy(&from, place.join(from.file_name().expect("a name"))).expect("copied");
            }
        }
        fs::write(path, bytes).expect("written");
    }
}

/// Writes all originals into `directory`.
pub fn write(directory: &Path) -> &'static [Original] {
    let make = |name: &str| {
        fs::create_dir_all(directory.join(name)).expect("made");
        directory.join(name)
    };
    let scaled = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128}});
    let llama = with(llama_json(), scaled);
    for (name, config) in [("llama", &llama), ("qwen3", &qwen3_json())] {
        write_directory(&make(name), config, &weights(config, 5));
    }
    write_sharded(&make("sharded"), &llama, &weights(&llama, 5));
    let generation = json!({"eos_token_id": [257, 258], "do_sample": true, "temperature": 0.6});
    fs::write(directory.join("llama/generation_config.json"), generation.to_string()).expect("written");
    let (config, gguf) = (llama_json(), make("gguf").join("model.gguf"));
    let tensors = gguf::tensors(&config, &weights(&config, 5), GgmlDType::Q8_0);
    gguf::write(&gguf, &gguf::metadata("llama", &config), &tensors);

    let ruler = |index: usize| {
        json!({"index": index, "input": "VAR A = 12. What is A?", "outputs": ["12", "A"], "length": 64,
            "answer_prefix": " It is"})
    };
    fs::write(make("ruler/vt").join("validation.jsonl"), format!("{}\n{}\n", ruler(0), ruler(1))).expect("written");
    let record = |id: &str| {
        json!({"_id": id, "domain": "Code", "sub_domain": "Repositories", "difficulty": "hard", "length": "short",
            "question": "Which?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "B",
            "context": "The sky is blue. "})
    };
    fs::write(make("longbench").join("data.json"), json!([record("x"), record("y")]).to_string()).expect("written");
    let passkey = |id: usize| {
        json!({"id": id, "context": "The key is 12.", "input": "What is the key?", "answer": ["12"],
            "options": []})
    };
    let lines = format!("{}\n{}\n", passkey(1), passkey(2));
    fs::write(make("infinitebench").join("passkey.jsonl"), lines).expect("written");
    journal(&make("journal").join("outcomes.jsonl"));
    ORIGINALS
}

fn journal(path: &Path) {
    let mut journal = Journal::open(path).expect("a journal");
    for (index, method) in [(0, "dense"), (0, "s2o"), (1, "dense"), (1, "s2o")] {
        let setting = Setting {
            model: "m".to_owned(),
            dtype: "f32".to_owned(),
            device: "cpu".to_owned(),
            template: ChatTemplate::None,
            chunk: "auto".to_owned(),
        };
        let outcome = Outcome {
            key: Key { sample: format!("niah-{index}"), method: method.to_owned(), setting },
            digest: Some("0123456789abcdef".to_owned()),
            task: "niah".to_owned(),
            groups: vec!["easy".to_owned()],
            context_tokens: 100,
            depth: Some(0.5),
            index,
            seed: Some(7),
            prompt_tokens: 99,
            density: 0.25,
            layer_density: vec![0.25],
            prefill_seconds: 1.5,
            result: SampleResult::Answer { prediction: "12".to_owned(), references: vec!["12".to_owned()], score: 1.0 },
        };
        journal.append(outcome).expect("written");
    }
}
