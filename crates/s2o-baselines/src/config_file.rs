//! Configurations in JSON files.

use std::path::Path;
use std::{fs, io};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::BaselineError;

/// Reads a configuration; `expected` describes it in errors.
pub(crate) fn load<C: DeserializeOwned>(path: &Path, expected: &'static str) -> Result<C, BaselineError> {
    let text = fs::read_to_string(path).map_err(|error| failed("read", path, error))?;
    serde_json::from_str(&text).map_err(|error| {
        let (path, got) = (path.to_owned(), error.to_string());
        BaselineError::ConfigFile { path, expected, got }
    })
}

/// Writes a configuration that [`load`] reads.
pub(crate) fn save<C: Serialize>(config: &C, path: &Path, expected: &'static str) -> Result<(), BaselineError> {
    let text = serde_json::to_string_pretty(config).map_err(|error| {
        let (path, got) = (path.to_owned(), error.to_string());
        BaselineError::ConfigFile { path, expected, got }
    })?;
    fs::write(path, text + "\n").map_err(|error| failed("write", path, error))
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> BaselineError {
    BaselineError::Io { action, path: path.to_owned(), source }
}
