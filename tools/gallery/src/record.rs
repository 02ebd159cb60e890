//! Rows of the benchmarks' record of one device.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::rows::{Sourced, distinct, missing, read};

const COLUMNS: &str = "bench, method, q_len, k_len, heads, dtype, density, error, ms, baseline, baseline_ms, ratio";

/// The columns of `benches/record` that the gallery uses.
#[derive(Debug, Clone, Deserialize)]
pub struct Measurement {
    pub bench: String,
    /// The method and its tensors.
    pub method: String,
    /// Tokens of the prompt. A chunk of queries has a different `k_len`.
    pub q_len: usize,
    pub k_len: usize,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: String,
    /// Share of the causal tiles that were computed.
    pub density: Option<f64>,
    /// Relative distance from exact attention, or from exact logits.
    pub error: Option<f64>,
    /// Mean of the heads' distances; absent in records of other benchmarks and of earlier days.
    #[serde(default)]
    pub error_by_head: Option<f64>,
    /// Median time in milliseconds.
    pub ms: f64,
    /// The method that alternated with it.
    pub baseline: String,
    pub baseline_ms: Option<f64>,
    /// Time of the baseline over time of the method.
    pub ratio: Option<f64>,
}

/// Endings of the method in the rows of the bench `methods` that time one phase.
pub const SELECTION: &str = ", selection";
pub const ATTENTION: &str = ", attention";

impl Measurement {
    /// Whether the row of the bench `methods` is of both phases together.
    pub fn is_whole(&self) -> bool {
        ![SELECTION, ATTENTION].iter().any(|part| self.method.ends_with(part))
    }
}

/// The rows of all days, newest last.
pub fn of_device(directory: &Path) -> Result<Vec<Sourced<Measurement>>> {
    let expected = "CSV files of a benchmark's record";
    ensure!(directory.exists(), missing(directory, expected, "no such directory"));
    let entries = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "csv"));
    ensure!(!files.is_empty(), missing(directory, expected, "none"));
    // The file names are dates.
    files.sort();
    let days = files.iter().map(|file| read(file, COLUMNS)).collect::<Result<Vec<_>>>()?;
    Ok(days.into_iter().flatten().collect())
}

/// The newest row for each method and length among the rows of whole prompts that `picks` accepts, in ascending order
/// of length. `expected` names such rows in the error if there are none.
pub fn newest<'r>(
    directory: &Path,
    rows: &'r [Sourced<Measurement>],
    expected: &str,
    picks: impl Fn(&Measurement) -> bool,
) -> Result<Vec<&'r Sourced<Measurement>>> {
    let mut newest: Vec<&Sourced<Measurement>> = Vec::new();
    for row in rows.iter().filter(|row| row.q_len == row.k_len && picks(row)) {
        match newest.iter_mut().find(|there| (&there.method, there.q_len) == (&row.method, row.q_len)) {
            Some(there) => *there = row,
            None => newest.push(row),
        }
    }
    ensure!(!newest.is_empty(), missing(directory, expected, &format!("none among {} rows", rows.len())));
    newest.sort_by_key(|row| row.q_len);
    Ok(newest)
}

/// Distinct precisions and heads: `bf16, 24 query and 12 KV heads of 128`.
pub fn shapes(rows: &[&Sourced<Measurement>]) -> String {
    let shape = |row: &&Sourced<Measurement>| {
        let Measurement { dtype, heads, kv_heads, head_dim, .. } = &row.row;
        format!("{dtype}, {heads} query and {kv_heads} KV heads of {head_dim}")
    };
    distinct(rows.iter().map(shape)).join("; ")
}
