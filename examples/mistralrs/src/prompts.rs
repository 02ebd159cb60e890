//! Prompts: recorded passkeys, and random tokens.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// A passkey prompt and its answer.
#[derive(Debug, Deserialize)]
pub struct Record {
    /// The whole prompt, question included.
    pub input: String,
    /// The expected digits.
    pub answer: String,
    /// Length in tokens of needle-7m's tokenizer.
    pub tokens: usize,
}

/// The prompts of a file of JSON lines that have at least `longer_than` tokens.
///
/// # Errors
/// If the file cannot be read, a line is no record, or no prompt is that long.
pub fn passkeys(path: &Path, longer_than: usize) -> Result<Vec<Record>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut records = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let record: Record =
            serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), index + 1))?;
        if record.tokens >= longer_than {
            records.push(record);
        }
    }
    ensure!(!records.is_empty(), "{}: expected a prompt of at least {longer_than} tokens, got none", path.display());
    Ok(records)
}

/// `tokens` ids below `vocab`, the first of them 0 (the sink of synthetic weights); the same for the same seed.
pub fn random(vocab: u32, tokens: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let next = || {
        // xorshift64: the ids only have to differ.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1 + (state >> 32) as u32 % (vocab - 1)
    };
    std::iter::once(0).chain(std::iter::repeat_with(next)).take(tokens).collect()
}
