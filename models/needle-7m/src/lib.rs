//! The files of needle-7m, embedded: a language model of 6,951,680 parameters (Qwen3 architecture, 131,072 positions)
//! that was trained to find passkeys and keyed values at 4K to 128K tokens. It tests attention methods end to end
//! without a download. The README documents the training, the measurements and the sources of the text.
//!
//! It was the embedded model of `s2o-models` before needle-11m; the benchmark `attention` times its tensors. [`write()`]
//! makes a model directory:
//!
//! ```no_run
//! s2o_needle_7m::write("needle-7m".as_ref())?;
//! # std::io::Result::Ok(())
//! ```

use std::fs;
use std::io;
use std::path::Path;

/// `config.json` of the architecture `Qwen3ForCausalLM`.
pub const CONFIG: &str = include_str!("../config.json");
/// `generation_config.json`: greedy, the ids of the special tokens.
pub const GENERATION_CONFIG: &str = include_str!("../generation_config.json");
/// `tokenizer.json`: byte-level BPE of 4096 entries, every digit a token.
pub const TOKENIZER: &str = include_str!("../tokenizer.json");

/// The weights in the layout of `pack.py`, which gzip compresses to less than the 10 MiB that crates.io accepts: the
/// header of the safetensors file, then the high bytes of all words, then their low bytes. Each bf16 word is rotated
/// left by one bit, so that the high byte holds the whole exponent.
const PLANES: &[u8] = include_bytes!("../model.planes");

/// The weights as a safetensors file: bf16, Hugging Face names, 13.9 MB. Each call assembles a new copy, which takes
/// about 10 ms in a release build.
pub fn safetensors() -> Vec<u8> {
    let (length, rest) = PLANES.split_first_chunk().expect("the file starts with the length of its header");
    let (header, planes) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let (high, low) = planes.split_at(planes.len() / 2);
    let mut file = PLANES.to_vec();
    let words = file[length.len() + header.len()..].chunks_exact_mut(2);
    for (word, (high, low)) in words.zip(high.iter().zip(low)) {
        word.copy_from_slice(&u16::from_be_bytes([*high, *low]).rotate_right(1).to_le_bytes());
    }
    file
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

    /// Hash of the file that the training wrote.
    const SHA256: &str = "5b8fd1f5b68638b30d2fe4cde4b122dd8ca60f0b0e30549e629471c125e077aa";

    #[test]
    fn weights_are_those_of_the_training() {
        let digest = Sha256::digest(safetensors()).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(digest, SHA256);
    }

    #[test]
    fn a_directory_holds_the_embedded_files() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("made/needle-7m");
        write(&directory).unwrap();
        assert_eq!(fs::read(directory.join("model.safetensors")).unwrap(), safetensors());
        for (file, text) in
            [("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG), ("tokenizer.json", TOKENIZER)]
        {
            assert_eq!(fs::read_to_string(directory.join(file)).unwrap(), text);
        }
    }
}
