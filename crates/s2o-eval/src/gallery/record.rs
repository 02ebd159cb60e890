//! Rows of the benchmarks' record of one device.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::error::{GalleryError, Result};
use super::rows::{Sourced, distinct, read};
use crate::error::EvalError;

/// The columns of `benches/record` that are shown.
#[derive(Debug, Clone, Deserialize)]
pub struct Measurement {
    /// The benchmark.
    pub bench: String,
    /// The method, and what it ran on.
    pub method: String,
    /// Tokens of the prompt; a chunk of queries has another `k_len`.
    pub q_len: usize,
    pub k_len: usize,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: String,
    /// Share of the causal tiles that were computed.
    pub density: Option<f64>,
    /// Median time in milliseconds.
    pub ms: f64,
    /// What took turns with it.
    pub baseline: String,
    pub baseline_ms: Option<f64>,
    /// Baseline over method.
    pub ratio: Option<f64>,
}

/// The rows of all days, the newest last.
///
/// # Errors
/// [`GalleryError::Missing`] if there are none; those of [`read`].
pub fn of_device(directory: &Path) -> Result<Vec<Sourced<Measurement>>> {
    let none = |got: String| GalleryError::Missing {
        path: directory.to_owned(),
        expected: "CSV files of a benchmark's record".to_owned(),
        got,
    };
    if !directory.exists() {
        return Err(none("no such directory".to_owned()));
    }
    let failed = |source| EvalError::Io { path: directory.to_owned(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "csv") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(none("none".to_owned()));
    }
    // Each is named after its day.
    files.sort();
    let mut rows = Vec::new();
    for file in files {
        rows.extend(read(
            &file,
            "bench, method, q_len, k_len, heads, dtype, density, ms, baseline, baseline_ms, ratio",
        )?);
    }
    Ok(rows)
}

/// The rows that `picks` takes of whole prompts, of each method and length the newest, lengths ascending.
///
/// # Errors
/// [`GalleryError::Missing`] if there are none; `expected` says what they would be.
pub fn newest<'r>(
    directory: &Path,
    rows: &'r [Sourced<Measurement>],
    expected: &str,
    picks: impl Fn(&Measurement) -> bool,
) -> Result<Vec<&'r Sourced<Measurement>>> {
    let mut newest: Vec<&Sourced<Measurement>> = Vec::new();
    for row in rows.iter().filter(|row| row.row.q_len == row.row.k_len && picks(&row.row)) {
        let place = |row: &Sourced<Measurement>| (row.row.method.clone(), row.row.q_len);
        match newest.iter_mut().find(|there| place(there) == place(row)) {
            Some(there) => *there = row,
            None => newest.push(row),
        }
    }
    if newest.is_empty() {
        let (expected, got) = (expected.to_owned(), format!("none among {} rows", rows.len()));
        return Err(GalleryError::Missing { path: directory.to_owned(), expected, got });
    }
    newest.sort_by_key(|row| row.row.q_len);
    Ok(newest)
}

/// Precisions and heads, each once: `bf16, 24 query and 12 KV heads of 128`.
pub fn shapes(rows: &[&Sourced<Measurement>]) -> String {
    let shape = |row: &&Sourced<Measurement>| {
        let Measurement { dtype, heads, kv_heads, head_dim, .. } = &row.row;
        format!("{dtype}, {heads} query and {kv_heads} KV heads of {head_dim}")
    };
    distinct(rows.iter().map(shape)).join("; ")
}
