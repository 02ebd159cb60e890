//! Rows of CSV files, each with where it comes from.

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{GalleryError, Result};
use crate::error::EvalError;

/// Where a row comes from, in its last columns; a file may lack some of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Origin {
    /// The day it was measured.
    pub date: String,
    /// The project's commit.
    pub commit: String,
    /// What it was measured on.
    pub device: String,
    /// That device's driver.
    pub driver: String,
    /// The file, or the model and its prompt.
    pub source: String,
    /// What was called.
    pub command: String,
}

/// A row, its file and its origin.
#[derive(Debug, Clone)]
pub struct Sourced<R> {
    /// What was measured.
    pub row: R,
    /// Where it comes from.
    pub origin: Origin,
    /// The file it stands in.
    pub path: PathBuf,
}

/// Reads a file of rows.
///
/// # Errors
/// [`GalleryError::Line`] for a line without the `columns`, [`GalleryError::Missing`] if there is no row, [`EvalError::Io`].
pub fn read<R: DeserializeOwned>(path: &Path, columns: &str) -> Result<Vec<Sourced<R>>> {
    let file = File::open(path).map_err(|source| EvalError::Io { path: path.to_owned(), source })?;
    let mut reader = csv::Reader::from_reader(file);
    let wrong = |error: csv::Error| unreadable(path, columns, error);
    let headers = reader.headers().map_err(wrong)?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(wrong)?;
        let row = record.deserialize(Some(&headers)).map_err(wrong)?;
        let origin = record.deserialize(Some(&headers)).map_err(wrong)?;
        rows.push(Sourced { row, origin, path: path.to_owned() });
    }
    if rows.is_empty() {
        let expected = format!("rows with the columns {columns}");
        return Err(GalleryError::Missing { path: path.to_owned(), expected, got: "none".to_owned() });
    }
    Ok(rows)
}

fn unreadable(path: &Path, columns: &str, error: csv::Error) -> GalleryError {
    let line = error.position().map_or(1, csv::Position::line);
    let got = match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => err.to_string(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => format!("{len} columns under {expected_len} names"),
        csv::ErrorKind::Utf8 { err, .. } => err.to_string(),
        _ => return EvalError::Io { path: path.to_owned(), source: error.into() }.into(),
    };
    GalleryError::Line { path: path.to_owned(), line, expected: format!("the columns {columns}"), got }
}

/// Reads what the experiment `name` left in a directory.
///
/// # Errors
/// [`GalleryError::Missing`] if there is no such file; those of [`read`].
pub fn of_experiment<R: DeserializeOwned>(directory: &Path, name: &str, columns: &str) -> Result<Vec<Sourced<R>>> {
    let path = directory.join(format!("{name}.csv"));
    if !path.exists() {
        return Err(GalleryError::Missing {
            path: directory.to_owned(),
            expected: format!("{name}.csv of `evaluate experiment {name}`"),
            got: "none".to_owned(),
        });
    }
    read(&path, columns)
}

/// Of each method, or whatever `of` says, the rows of the run that wrote its last row: files are appended to.
pub fn newest_runs<R, K: Eq + Hash>(rows: Vec<Sourced<R>>, of: impl Fn(&R) -> K) -> Vec<Sourced<R>> {
    let last: HashMap<K, Origin> = rows.iter().map(|row| (of(&row.row), row.origin.clone())).collect();
    let is_newest = |row: &Sourced<R>| last.get(&of(&row.row)) == Some(&row.origin);
    rows.into_iter().filter(is_newest).collect()
}

/// Values in the order in which they first occur.
pub fn distinct<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::experiment::matched_density::MatchedRow;

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
        let found: Vec<_> = rows.iter().map(|row| (row.row.mse, row.row.mae, row.origin.command.as_str())).collect();
        assert_eq!(found, [(Some(2.0), Some(2.0), "x"), (Some(3.0), None, "y,z")]);
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text: &str| rows_of(text).expect_err("an error").to_string();
        for (text, part) in [
            (
                "method,density\ns2o,0.5\n",
                ", line 2: expected the columns method, density, layers, mse, mae, rel_l1, got ",
            ),
            (
                "method,density,layers,mse,mae,rel_l1\na,0.5,1,,,\na,half,1,,,\n",
                "rows.csv, line 3: expected the columns ",
            ),
            (
                "method,density\na,1,2\n",
                ", line 2: expected the columns method, density, layers, mse, mae, rel_l1, got 3 columns under 2 names",
            ),
            ("method,density,layers,mse,mae,rel_l1\n", "rows.csv: expected rows with the columns method, "),
            ("", "rows.csv: expected rows with the columns method, "),
        ] {
            assert!(error(text).contains(part), "{part} in {}", error(text));
        }
        let missing = read::<MatchedRow>(Path::new("no/such.csv"), COLUMNS).expect_err("an error");
        assert!(missing.to_string().starts_with("cannot read no/such.csv: "), "{missing}");
    }
}
