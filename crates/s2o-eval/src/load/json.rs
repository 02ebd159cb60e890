//! Readers of JSON files and JSON lines. A parse error names the line.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{EvalError, Result};

/// The place of a record in a file, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    pub(super) line: usize,
}

impl Place<'_> {
    pub(super) fn malformed(self, expected: impl Into<String>, got: impl Into<String>) -> EvalError {
        let Self { path, line } = self;
        EvalError::MalformedLine { path: path.to_owned(), line, expected: expected.into(), got: got.into() }
    }
}

pub(super) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| EvalError::Io { path: path.to_owned(), source })
}

/// The record of each non-empty line, with its place. `expected` describes a valid line in errors.
///
/// # Errors
/// [`EvalError::MalformedLine`] for the first line that is not such a record, or for a file without records.
pub(super) fn lines<'a, T: DeserializeOwned>(
    path: &'a Path,
    text: &str,
    expected: &str,
) -> Result<Vec<(Place<'a>, T)>> {
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

/// Parses the whole text as one value.
///
/// # Errors
/// [`EvalError::MalformedLine`] with the line at which the parser stopped.
pub(super) fn whole<T: DeserializeOwned>(path: &Path, text: &str, expected: &str) -> Result<T> {
    serde_json::from_str(text)
        .map_err(|error| Place { path, line: error.line().max(1) }.malformed(expected, error.to_string()))
}
