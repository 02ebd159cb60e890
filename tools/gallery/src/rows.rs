//! Rows of CSV files, each with its provenance.

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, ensure};
use s2o_eval::Provenance;
pub use s2o_eval::report::{ascending, distinct};
use serde::de::DeserializeOwned;

/// A row, its file and its provenance.
#[derive(Debug, Clone)]
pub struct Sourced<R> {
    pub row: R,
    pub provenance: Provenance,
    pub path: PathBuf,
}

impl<R> Deref for Sourced<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.row
    }
}

/// An error in a line, counted from 1.
pub fn line_error(path: &Path, line: u64, expected: &str, got: &str) -> Error {
    anyhow!("{}, line {line}: expected {expected}, got {got}", path.display())
}

/// An error for a file or directory that lacks something.
pub fn missing(path: &Path, expected: &str, got: &str) -> Error {
    anyhow!("{}: expected {expected}, got {got}", path.display())
}

/// Reads a file of at least one row.
pub fn read<R: DeserializeOwned>(path: &Path, columns: &str) -> Result<Vec<Sourced<R>>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut reader = csv::Reader::from_reader(file);
    let wrong = |error: csv::Error| {
        let got = match error.kind() {
            csv::ErrorKind::Deserialize { err, .. } => err.to_string(),
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("{len} columns under {expected_len} names")
            }
            _ => error.to_string(),
        };
        line_error(path, error.position().map_or(1, csv::Position::line), &format!("the columns {columns}"), &got)
    };
    let headers = reader.headers().map_err(wrong)?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(wrong)?;
        let row = record.deserialize(Some(&headers)).map_err(wrong)?;
        let provenance = record.deserialize(Some(&headers)).map_err(wrong)?;
        rows.push(Sourced { row, provenance, path: path.to_owned() });
    }
    ensure!(!rows.is_empty(), missing(path, &format!("rows with the columns {columns}"), "none"));
    Ok(rows)
}

/// Reads the rows of the experiment `name` in a directory.
pub fn of_experiment<R: DeserializeOwned>(directory: &Path, name: &str, columns: &str) -> Result<Vec<Sourced<R>>> {
    let path = directory.join(format!("{name}.csv"));
    ensure!(path.exists(), missing(directory, &format!("{name}.csv of `evaluate experiment {name}`"), "none"));
    read(&path, columns)
}

/// For each key that `of` returns (such as the method), the rows of the run that wrote its last row in the file.
pub fn newest_runs<R, K: Eq + Hash>(rows: Vec<Sourced<R>>, of: impl Fn(&R) -> K) -> Vec<Sourced<R>> {
    let last: HashMap<K, Provenance> = rows.iter().map(|row| (of(row), row.provenance.clone())).collect();
    let is_newest = |row: &Sourced<R>| last.get(&of(row)) == Some(&row.provenance);
    rows.into_iter().filter(is_newest).collect()
}

#[cfg(test)]
mod tests {
    use s2o_eval::experiment::matched_density::MatchedRow;
    use tempfile::TempDir;

    use super::*;

    const COLUMNS: &str = "method, density, layers, mse, mae, rel_l1";

    fn rows_of(text: &str) -> Result<Vec<Sourced<MatchedRow>>> {
        let directory = TempDir::new().expect("a directory");
        let path = directory.path().join("rows.csv");
        std::fs::write(&path, text).expect("written");
        read(&path, COLUMNS)
    }

    #[test]
    fn a_method_is_its_newest_run() {
        let text = "method,density,layers,mse,mae,rel_l1,commit,command\na,0.5,1,1,1,1,old,x\nb,0.5,1,2,2,2,old,x\n\
            a,0.5,1,3,,3,new,\"y,z\"\n";
        let rows = newest_runs(rows_of(text).expect("rows"), |row: &MatchedRow| row.method.clone());
        let found = rows.iter().map(|row| (row.mse, row.mae, row.provenance.command.as_str()));
        let found: Vec<_> = found.collect();
        assert_eq!(found, [(Some(2.0), Some(2.0), "x"), (Some(3.0), None, "y,z")]);
    }

    #[test]
    fn errors_name_the_line() {
        let columns = format!("expected the columns {COLUMNS}, got ");
        let names = COLUMNS.replace(", ", ",");
        for (text, part) in [
            ("method,density\ns2o,0.5\n".to_owned(), format!(", line 2: {columns}")),
            (format!("{names}\na,0.5,1,,,\na,half,1,,,\n"), format!("rows.csv, line 3: {columns}")),
            ("method,density\na,1,2\n".to_owned(), format!(", line 2: {columns}3 columns under 2 names")),
            (format!("{names}\n"), format!("rows.csv: expected rows with the columns {COLUMNS}")),
            (String::new(), format!("rows.csv: expected rows with the columns {COLUMNS}")),
        ] {
            let error = rows_of(&text).expect_err("an error").to_string();
            assert!(error.contains(&part), "{part} in {error}");
        }
        let missing = read::<MatchedRow>(Path::new("no/such.csv"), COLUMNS).expect_err("an error");
        assert!(format!("{missing:#}").starts_with("cannot read no/such.csv: "), "{missing:#}");
    }
}
