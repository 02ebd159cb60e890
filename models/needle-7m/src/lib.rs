//! The weights of needle-7m, embedded: a language model of 6,951,680 parameters (Qwen3 architecture, 131,072 positions)
//! that was trained to find passkeys and keyed values at 4K to 128K tokens. The README documents the training, the
//! measurements and the sources of the text.
//!
//! It was the embedded model of `s2o-models` before needle-11m, which has the same tokenizer. The benchmark `attention`
//! times its tensors.

/// `config.json` of the architecture `Qwen3ForCausalLM`.
pub const CONFIG: &str = include_str!("../config.json");

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
}
