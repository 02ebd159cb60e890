//! Reads JSON files and JSON lines; what does not parse becomes an error with its line.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{EvalError, Result};

/// The place of a record, for errors.
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

/// The record of each line that is not empty, with its place. `expected` says what a line should be.
///
/// # Errors
/// [`EvalError::MalformedLine`] for the first line that is no such record, or for a file without any.
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

/// The whole text as one value.
///
/// # Errors
/// [`EvalError::MalformedLine`] with the line where the parser gave up.
pub(super) fn whole<T: DeserializeOwned>(path: &Path, text: &str, expected: &str) -> Result<T> {
    serde_json::from_str(text)
        .map_err(|error| Place { path, line: error.line().max(1) }.malformed(expected, error.to_string()))
}
