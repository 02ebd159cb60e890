//! Items from files of published benchmarks, which the user supplies.
//!
//! Each loader reads the benchmark's own format and sets the benchmark's token budgets and scorers. An invalid line is
//! an error that names file, line, expected and actual content. No line is skipped, because a mean over the rest would
//! look like a result.

mod infinitebench;
mod longbench_v2;
mod needle_7m;
mod ruler;
mod truncation;

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use tokenizers::Tokenizer;

use crate::error::{EvalError, Result};

pub use infinitebench::{infinitebench, infinitebench_directory};
pub use longbench_v2::longbench_v2;
pub use needle_7m::{NEEDLE_7M, needle_7m};
pub use ruler::{ruler, ruler_directory};
pub use truncation::truncate_middle;

/// The context budget of LongBench v2 and InfiniteBench for models of 128K positions, in tokens.
pub const DEFAULT_MAX_TOKENS: usize = 120_000;

/// The place of a record in a file, for errors.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    path: &'a Path,
    line: usize,
}

impl Place<'_> {
    fn malformed(self, expected: impl Into<String>, got: impl Into<String>) -> EvalError {
        let Self { path, line } = self;
        EvalError::MalformedLine { path: path.to_owned(), line, expected: expected.into(), got: got.into() }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| EvalError::Io { path: path.to_owned(), source })
}

/// The record of each non-empty line, with its place. `expected` describes a valid line in errors.
///
/// # Errors
/// [`EvalError::MalformedLine`] for the first line that is not such a record, or for a file without records.
fn lines<'a, T: DeserializeOwned>(path: &'a Path, text: &str, expected: &str) -> Result<Vec<(Place<'a>, T)>> {
    let mut records = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = Place { path, line: i + 1 };
        let record = serde_json::from_str(line).map_err(|error| place.malformed(expected, error.to_string()))?;
        records.push((place, record));
    }
    match records.is_empty() {
        true => Err(Place { path, line: 1 }.malformed(expected, "an empty file")),
        false => Ok(records),
    }
}

/// The prompt of an item of `task`, cut in its middle so that it and `answer_prefix` have at most `max_tokens` tokens.
///
/// # Errors
/// [`EvalError::ContextTooShort`] if nothing of the prompt is left; [`EvalError::Tokenizer`].
fn cut_prompt(
    tokenizer: &Tokenizer,
    task: &str,
    prompt: &str,
    answer_prefix: &str,
    max_tokens: usize,
) -> Result<String> {
    let count =
        |text: &str, special| Ok::<_, EvalError>(tokenizer.encode(text, special).map_err(EvalError::tokenizer)?.len());
    let for_prefix = count(answer_prefix, false)?;
    let cut = truncate_middle(tokenizer, prompt, max_tokens.saturating_sub(for_prefix))?;
    if cut.is_empty() {
        let expected = for_prefix + count("", true)? + 1;
        return Err(EvalError::ContextTooShort { task: task.to_owned(), expected, got: max_tokens });
    }
    Ok(cut)
}

/// Parses the whole text as one value.
///
/// # Errors
/// [`EvalError::MalformedLine`] with the line at which the parser stopped.
fn whole<T: DeserializeOwned>(path: &Path, text: &str, expected: &str) -> Result<T> {
    serde_json::from_str(text)
        .map_err(|error| Place { path, line: error.line().max(1) }.malformed(expected, error.to_string()))
}
