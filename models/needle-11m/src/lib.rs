//! The files of needle-11m, embedded: a language model of 10,886,912 parameters (Qwen3 architecture, 131,072 positions)
//! that was trained to answer RULER's retrieval, tracing and counting tasks at 4K to 128K tokens. It tests attention
//! methods end to end without a download. The README documents the training, the measurements and the sources of the
//! text.
//!
//! `s2o-models` loads it as the model `needle-11m`. [`write()`] makes a model directory for every other program:
//!
//! ```no_run
//! s2o_needle_11m::write("needle-11m".as_ref())?;
//! # std::io::Result::Ok(())
//! ```

use std::fs;
use std::io;
use std::path::Path;

use half::bf16;
use serde_json::Value;

/// `config.json` of the architecture `Qwen3ForCausalLM`.
pub const CONFIG: &str = include_str!("../config.json");
/// `generation_config.json`: greedy, the ids of the special tokens.
pub const GENERATION_CONFIG: &str = include_str!("../generation_config.json");
/// `tokenizer.json`: byte-level BPE of 4096 entries, every digit a token.
pub const TOKENIZER: &str = include_str!("../tokenizer.json");

/// The weights in 8 bits, in the layout of `pack.py`. gzip compresses them to less than the 10 MiB that crates.io
/// accepts.
const PACKED: &[u8] = include_bytes!("../model.q8");

/// The weights as a safetensors file: bf16, Hugging Face names, 21.8 MB. Each call assembles a new copy, which takes
/// about 10 to 20 ms in a release build.
pub fn safetensors() -> Vec<u8> {
    let (length, rest) = PACKED.split_first_chunk().expect("the file starts with the length of its header");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let shapes = shapes(header);
    // Number of rows and of all values of the tensors with this many dimensions.
    let count = |dims: usize| {
        let tensors = shapes.iter().filter(|shape| shape.len() == dims);
        tensors.fold((0, 0), |(rows, all), shape| (rows + shape[0], all + shape.iter().product::<usize>()))
    };
    let (mut vectors, rest) = data.split_at(2 * count(1).1);
    let (scales, mut values) = rest.split_at(4 * count(2).0);
    let mut scales = scales.as_chunks().0.iter().map(|scale| f32::from_le_bytes(*scale));
    let mut file = [length, header].concat();
    for shape in &shapes {
        match shape[..] {
            [rows, columns] => {
                let (matrix, others) = values.split_at(rows * columns);
                for (row, scale) in matrix.chunks_exact(columns).zip(&mut scales) {
                    let weight = |&value: &u8| bf16::from_f32(f32::from(value as i8) * scale).to_le_bytes();
                    file.extend(row.iter().flat_map(weight));
                }
                values = others;
            }
            _ => {
                let (vector, others) = vectors.split_at(2 * shape[0]);
                file.extend(vector);
                vectors = others;
            }
        }
    }
    file
}

/// The shapes of the tensors that a safetensors header describes, in the order of their data.
fn shapes(header: &[u8]) -> Vec<Vec<usize>> {
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).expect("the header is JSON");
    let numbers = |value: &Value| value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect::<Vec<_>>();
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__").map(|(_, tensor)| tensor);
    let mut tensors: Vec<_> = tensors.map(|x| (numbers(&x["data_offsets"]), numbers(&x["shape"]))).collect();
    tensors.sort_unstable();
    tensors.into_iter().map(|(_, shape)| shape.into_iter().map(|dim| dim as usize).collect()).collect()
}

/// Writes a Hugging Face model directory: `config.json`, `generation_config.json`, `tokenizer.json` and
/// `model.safetensors`. Creates `directory` and its parents, and replaces files of these names.
///
/// # Errors
/// The first error of the file system.
pub fn write(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::write(directory.join("config.json"), CONFIG)?;
    fs::write(directory.join("generation_config.json"), GENERATION_CONFIG)?;
    fs::write(directory.join("tokenizer.json"), TOKENIZER)?;
    fs::write(directory.join("model.safetensors"), safetensors())
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// Hash of the file that `pack.py unpack` writes.
    const SHA256: &str = "9f12f5c8acc5066726cf735011116de5c741f04127277501591983dd1685f813";

    #[test]
    fn weights_are_those_that_were_measured() {
        let digest = Sha256::digest(safetensors()).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(digest, SHA256);
    }

    #[test]
    fn a_directory_holds_the_embedded_files() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("made/needle-11m");
        write(&directory).unwrap();
        assert_eq!(fs::read(directory.join("model.safetensors")).unwrap(), safetensors());
        for (file, text) in
            [("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG), ("tokenizer.json", TOKENIZER)]
        {
            assert_eq!(fs::read_to_string(directory.join(file)).unwrap(), text);
        }
    }
}
