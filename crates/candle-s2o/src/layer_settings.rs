//! [`LayerSettings`]: the tuned setting of each layer of a model, and its file format.

use std::fs;
use std::path::{Path, PathBuf};

use s2o_core::{ConfigError, S2oConfig};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Attention setting of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerSetting {
    /// Exact attention at every length.
    Dense,
    /// S2O with this threshold.
    Tau(f32),
}

/// Model, prompts and error bound of a tuning run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedOn {
    /// Name of the model.
    pub model: String,
    /// Length of each prompt in tokens.
    pub prompt_tokens: Vec<usize>,
    /// Bound on the relative L1 error of each layer's output.
    pub max_rel_l1: f64,
    /// The other S2O options, as text. The thresholds apply to these options.
    pub options: String,
}

/// A setting for every layer of one model. The file is JSON:
///
/// ```json
/// {
///   "version": 1,
///   "tuned_on": {
///     "model": "needle-11m", "prompt_tokens": [8190], "max_rel_l1": 0.02, "options": "segment auto, ..."
///   },
///   "layers": ["dense", { "tau": 0.02 }]
/// }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSettings(Document);

/// Contents of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u64,
    tuned_on: TunedOn,
    layers: Vec<LayerSetting>,
}

/// Error of settings by layer.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum LayerSettingsError {
    /// The file cannot be read or written.
    #[error("{}: {reason}", path.display())]
    Io { path: PathBuf, reason: String },
    /// The file does not contain settings by layer.
    #[error("{}: expected settings by layer (version {}), got {reason}", path.display(), LayerSettings::VERSION)]
    Malformed { path: PathBuf, reason: String },
    /// The file has another version of the format.
    #[error("{}: expected version {}, got version {got}", path.display(), LayerSettings::VERSION)]
    Version { path: PathBuf, got: String },
    /// There are no layers.
    #[error("settings by layer: expected at least one layer, got none")]
    Empty,
    /// A threshold is outside its range.
    #[error("settings of layer {layer}: {source}")]
    Config { layer: usize, source: ConfigError },
    /// The model has another number of layers.
    #[error("settings by layer: expected {expected} layers as the model has, got settings for {got}")]
    LayerCount { expected: usize, got: usize },
    /// A call is for a layer without settings.
    #[error("settings by layer: expected layers 0 to {}, got a call for layer {got}", num_layers - 1)]
    Layer { num_layers: usize, got: usize },
}

impl LayerSettings {
    /// The version of the file format.
    pub const VERSION: u64 = 1;

    /// Creates the settings of a model with one layer for each element of `layers`.
    ///
    /// # Errors
    /// If `layers` is empty or a threshold is outside `[0, 1)`.
    pub fn new(tuned_on: TunedOn, layers: Vec<LayerSetting>) -> Result<Self, LayerSettingsError> {
        if layers.is_empty() {
            return Err(LayerSettingsError::Empty);
        }
        for (layer, setting) in layers.iter().enumerate() {
            setting.apply(&S2oConfig::default()).map_err(|source| LayerSettingsError::Config { layer, source })?;
        }
        Ok(Self(Document { version: Self::VERSION, tuned_on, layers }))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If the file cannot be read, has another version, or has missing, unknown or invalid fields.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, LayerSettingsError> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(|error| io(path, &error))?;
        let malformed = |reason: String| LayerSettingsError::Malformed { path: path.to_owned(), reason };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        // The version is checked first because other versions may have other fields.
        match value.get("version") {
            Some(version) if version.as_u64() == Some(Self::VERSION) => {}
            Some(version) => {
                return Err(LayerSettingsError::Version { path: path.to_owned(), got: version.to_string() });
            }
            None => return Err(malformed("no field `version`".to_owned())),
        }
        let document: Document = serde_json::from_value(value).map_err(|error| malformed(error.to_string()))?;
        Self::new(document.tuned_on, document.layers)
    }

    /// Writes a file that [`LayerSettings::load`] reads.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), LayerSettingsError> {
        let path = path.as_ref();
        let text = serde_json::to_string_pretty(&self.0)
            .map_err(|error| LayerSettingsError::Malformed { path: path.to_owned(), reason: error.to_string() })?;
        fs::write(path, text + "\n").map_err(|error| io(path, &error))
    }

    /// Model, prompts and error bound of the tuning run.
    pub fn tuned_on(&self) -> &TunedOn {
        &self.0.tuned_on
    }

    /// The setting of each layer.
    pub fn layers(&self) -> &[LayerSetting] {
        &self.0.layers
    }

    /// Checks that the model has `num_layers` settings.
    ///
    /// # Errors
    /// [`LayerSettingsError::LayerCount`] if the numbers differ.
    pub fn check(&self, num_layers: usize) -> Result<(), LayerSettingsError> {
        match self.layers().len() {
            got if got == num_layers => Ok(()),
            got => Err(LayerSettingsError::LayerCount { expected: num_layers, got }),
        }
    }

    /// Returns `base` with the setting of `layer`.
    ///
    /// # Errors
    /// [`LayerSettingsError::Layer`] for a layer without settings.
    pub fn config(&self, layer: usize, base: &S2oConfig) -> Result<S2oConfig, LayerSettingsError> {
        let num_layers = self.layers().len();
        let setting = self.layers().get(layer).ok_or(LayerSettingsError::Layer { num_layers, got: layer })?;
        setting.apply(base).map_err(|source| LayerSettingsError::Config { layer, source })
    }
}

impl LayerSetting {
    /// Returns `base` with this setting.
    ///
    /// # Errors
    /// [`ConfigError::Tau`] for a threshold outside `[0, 1)`.
    pub fn apply(self, base: &S2oConfig) -> Result<S2oConfig, ConfigError> {
        match self {
            Self::Dense => base.to_builder().dense_below(usize::MAX).build(),
            Self::Tau(tau) => base.to_builder().tau(tau).build(),
        }
    }
}

fn io(path: &Path, error: &std::io::Error) -> LayerSettingsError {
    LayerSettingsError::Io { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use s2o_core::Tau;

    use super::*;

    fn settings() -> LayerSettings {
        let tuned_on = TunedOn {
            model: "needle-11m".to_owned(),
            prompt_tokens: vec![4096, 8190],
            max_rel_l1: 0.02,
            options: "segment auto".to_owned(),
        };
        LayerSettings::new(tuned_on, vec![LayerSetting::Dense, LayerSetting::Tau(0.02), LayerSetting::Tau(0.3)])
            .unwrap()
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layers.json");
        fs::write(&path, text).unwrap();
        (directory, path)
    }

    #[test]
    fn what_is_saved_is_what_is_loaded() {
        let (_directory, path) = file("");
        settings().save(&path).unwrap();
        assert_eq!(LayerSettings::load(&path), Ok(settings()));
        assert_eq!(settings().tuned_on().prompt_tokens, [4096, 8190]);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("\"version\": 1") && text.contains("\"tau\": 0.02\n"), "{text}");
    }

    #[test]
    fn wrong_files_say_what_was_expected_and_got() {
        let tuned_on = r#""tuned_on":{"model":"m","prompt_tokens":[],"max_rel_l1":0.1,"options":""}"#;
        for (text, words) in [
            ("", "expected settings by layer (version 1), got EOF"),
            ("{}", "got no field `version`"),
            (r#"{"version":2,"new":[]}"#, "expected version 1, got version 2"),
            (r#"{"version":"one"}"#, "expected version 1, got version \"one\""),
            (&format!(r#"{{"version":1,{tuned_on},"layers":["dense"],"tua":1}}"#), "unknown field `tua`"),
            (&format!(r#"{{"version":1,{tuned_on},"layers":["sparse"]}}"#), "unknown variant `sparse`"),
            (&format!(r#"{{"version":1,{tuned_on},"layers":[]}}"#), "expected at least one layer, got none"),
            (
                &format!(r#"{{"version":1,{tuned_on},"layers":["dense",{{"tau":1.5}}]}}"#),
                "settings of layer 1: tau: expected a number in [0, 1), got 1.5",
            ),
            (r#"{"version":1,"layers":["dense"]}"#, "missing field `tuned_on`"),
        ] {
            let (_directory, path) = file(text);
            let error = LayerSettings::load(&path).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let error = LayerSettings::load("no-such-file").unwrap_err().to_string();
        assert!(error.starts_with("no-such-file: "), "{error}");
    }

    #[test]
    fn layers_must_be_those_of_the_model() {
        assert_eq!(settings().check(3), Ok(()));
        let error = settings().check(6).unwrap_err().to_string();
        assert_eq!(error, "settings by layer: expected 6 layers as the model has, got settings for 3");
        let base = S2oConfig::default();
        assert_eq!(settings().config(1, &base).unwrap().tau(), Tau::Fixed(0.02));
        assert_eq!(settings().config(0, &base).unwrap().dense_below().resolve(0), usize::MAX);
        let error = settings().config(3, &base).unwrap_err().to_string();
        assert_eq!(error, "settings by layer: expected layers 0 to 2, got a call for layer 3");
    }
}
