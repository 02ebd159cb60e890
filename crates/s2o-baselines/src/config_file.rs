//! [`LayerConfig`]: settings by layer in a JSON file.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::BaselineError;

/// Settings of a layer that a file holds.
pub trait LayerEntry: Serialize + DeserializeOwned {
    /// The content of such a file, for errors.
    const CONTENT: &'static str;
}

/// The settings of a model's layers, as a search finds them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig<T> {
    /// The settings of each layer.
    pub layers: BTreeMap<usize, T>,
}

impl<T> Default for LayerConfig<T> {
    fn default() -> Self {
        Self { layers: BTreeMap::new() }
    }
}

impl<T: LayerEntry> LayerConfig<T> {
    /// Reads a file. The method that takes the settings checks their values.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else; unknown fields are refused.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, BaselineError> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(|error| failed("read", path, error))?;
        serde_json::from_str(&text).map_err(|error| invalid::<T>(path, &error))
    }

    /// Writes a file that [`Self::load`] reads.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), BaselineError> {
        let path = path.as_ref();
        let text = serde_json::to_string_pretty(self).map_err(|error| invalid::<T>(path, &error))?;
        fs::write(path, text + "\n").map_err(|error| failed("write", path, error))
    }
}

fn invalid<T: LayerEntry>(path: &Path, error: &serde_json::Error) -> BaselineError {
    BaselineError::ConfigFile { path: path.to_owned(), expected: T::CONTENT, got: error.to_string() }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> BaselineError {
    BaselineError::Io { action, path: path.to_owned(), source }
}
