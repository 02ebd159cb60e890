//! Reads tokenizer.json.

use std::path::Path;
use std::str::FromStr;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::read_text;
use crate::error::{ModelError, Result};

/// Reads a `tokenizer.json`.
pub(super) fn read_tokenizer(path: &Path) -> Result<Tokenizer> {
    let hint = ": a tokenizer.json is needed to encode text (tokenizer.model alone cannot be read)";
    let text = read_text(path, hint)?;
    let named = |reason: String| ModelError::tokenizer(format!("{}: {reason}", path.display()));
    check(&text).map_err(named)?;
    Tokenizer::from_str(&text).map_err(|error| named(error.to_string()))
}

/// Refuses what makes tokenizers 0.23 panic: text that is no JSON, and merges that do not fit the vocabulary.
fn check(text: &str) -> Result<(), String> {
    let json: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let model = &json["model"];
    let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else { return Ok(()) };
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default().len();
    for merge in merges {
        let (first, second) = match merge {
            Value::String(pair) => pair.split_once(' ').unwrap_or((pair, "")),
            Value::Array(pair) => match &pair[..] {
                [Value::String(first), Value::String(second)] => (first.as_str(), second.as_str()),
                _ => continue,
            },
            _ => continue,
        };
        if !second.is_char_boundary(prefix) || first.len() + second.len() - prefix > longest {
            return Err(format!("merges: expected two tokens that together are one, got {merge}"));
        }
    }
    Ok(())
}
