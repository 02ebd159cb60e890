//! The recorded passkey prompts of needle-7m: a needle hidden in real text, and the question for it.
//! `s2o_eval::tasks::passkey` makes prompts of other lengths.

use serde::Deserialize;

use crate::error::{ModelError, Result};

const PASSKEY_JSONL: &str = include_str!("../passkey.jsonl");

/// The first line of every prompt.
pub const HEADER: &str = "Some special magic numbers are hidden within the following text. Make sure to memorize it. \
                          I will quiz you about the numbers afterwards.\n";

/// A prompt from the embedded `passkey.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PasskeyRecord {
    /// The whole prompt, question included.
    pub input: String,
    /// The expected digits.
    pub answer: String,
    /// `passkey`, `single-key` or `multi-key-4`.
    pub kind: String,
    /// Length in tokens of `needle-7m`'s tokenizer.
    pub tokens: usize,
    /// Position of the needle: 0 at the start, 1 at the end.
    pub depth: f64,
}

/// The embedded prompts: 20 near 4K and 10 near 32K tokens of `needle-7m`.
///
/// # Errors
/// [`ModelError::InvalidConfig`] if the embedded file is damaged.
pub fn records() -> Result<Vec<PasskeyRecord>> {
    PASSKEY_JSONL
        .lines()
        .map(|line| serde_json::from_str(line).map_err(|e| ModelError::config("passkey.jsonl", e)))
        .collect()
}

/// The answer in a continuation by `needle-7m`'s rule: the text up to the first `.`, trimmed.
pub fn answer(generated: &str) -> &str {
    generated.split('.').next().unwrap_or_default().trim()
}

/// Whether a continuation is right by `needle-7m`'s rule: the text up to the first `.`, trimmed, is the answer.
pub fn answers_exactly(generated: &str, answer: &str) -> bool {
    self::answer(generated) == answer
}

/// Whether a continuation contains the answer anywhere: the rule for models that answer in sentences.
pub fn answers(generated: &str, answer: &str) -> bool {
    generated.contains(answer)
}

/// The text of all embedded prompts without header, needles and question: about 1.2 million characters of English.
///
/// # Errors
/// As [`records`].
pub fn haystack() -> Result<String> {
    let mut text = String::with_capacity(PASSKEY_JSONL.len());
    for record in records()? {
        let body = record.input.strip_prefix(HEADER).unwrap_or(&record.input);
        let body = body.rfind("\n\nWhat is the ").map_or(body, |question| &body[..question]);
        for line in body.split_inclusive('\n') {
            if !line.starts_with("The pass key is ") && !line.starts_with("The special magic number for ") {
                text.push_str(line);
            }
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn haystack_has_no_needle() {
        let text = haystack().unwrap();
        assert!(text.len() > 1_000_000);
        for trace in ["pass key is", "special magic number", "quiz you about"] {
            assert!(!text.contains(trace), "{trace}");
        }
    }

    #[test]
    fn scoring_follows_the_models_card() {
        assert!(answers_exactly(" 1234567. The", "1234567"));
        assert!(answers_exactly("1234567", "1234567"));
        assert!(!answers_exactly(" 12345678.", "1234567"));
        assert!(!answers_exactly("It is 1234567.", "1234567"));
        assert!(answers("It is 1234567.", "1234567"));
    }
}
