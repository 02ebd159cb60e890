//! The policy: which calls are sparse, for the whole process, and what was skipped.
//!
//! Until [`set_policy`] is called the environment decides, read once:
//!
//! | variable | |
//! |---|---|
//! | `S2O_TAU` | threshold in `[0, 1)`; 0 never stops early |
//! | `S2O_SEGMENT` | tokens in a segment, or `auto` |
//! | `S2O_DENSE_BELOW` | prompts below this many tokens are dense, or `auto`: the device's break-even |
//! | `S2O_LAYERS` | a file of thresholds by layer ([`LayerSettings`]), in place of `S2O_TAU` |
//! | `S2O_OFF` | `1`: everything is dense |
//!
//! A value that cannot be is an error of every call, [`PolicyError`], until [`set_policy`] replaces it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use candle_core::Tensor;
use candle_s2o::S2oOp;
use thiserror::Error;

pub use candle_s2o::{
    AttnStats, ConfigError, DenseBelow, LayerSetting, LayerSettings, LayerSettingsError, S2oConfig, S2oConfigBuilder,
    SegmentLen, TunedOn,
};

use crate::error::FlashAttnError;
use crate::layer_count;

/// How causal attention without window, ALiBi or softcap is computed.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// Exactly.
    Dense,
    /// By S2O, from prompts of [`S2oConfig::dense_below`] tokens on. Each call is taken for the end of its prompt.
    S2o(S2oConfig),
    /// By S2O, with the threshold of each layer. Nobody says which layer calls: causal calls with more than one query are
    /// counted by thread, modulo the number of layers, and calls that cannot be those of such a model are errors
    /// ([`FlashAttnError::LayerCount`]; docs/swap.md says what cannot be noticed). A single query is exact.
    Layers {
        /// The options beside the thresholds.
        base: S2oConfig,
        /// A setting for each layer.
        settings: Arc<LayerSettings>,
    },
}

impl Default for Policy {
    fn default() -> Self {
        Self::S2o(S2oConfig::default())
    }
}

impl Policy {
    /// The policy that `variable` describes.
    fn read(variable: impl Fn(&'static str) -> Option<OsString>) -> Result<Self, PolicyError> {
        let parse = |name, expected| {
            let text = variable(name).map(|text| text.to_string_lossy().trim().to_owned());
            (text.clone(), PolicyError::Variable { name, expected, got: text.unwrap_or_default() })
        };
        let mut config = S2oConfig::default();
        if let (Some(text), error) = parse("S2O_TAU", "a number in [0, 1)") {
            let tau = text.parse().map_err(|_| error)?;
            config = built("S2O_TAU", config.to_builder().tau(tau).build())?;
        }
        if let (Some(text), error) = parse("S2O_SEGMENT", "a number of tokens or auto") {
            let len = if text == "auto" {
                SegmentLen::Auto
            } else {
                text.parse().map(SegmentLen::Fixed).map_err(|_| error)?
            };
            config = built("S2O_SEGMENT", config.to_builder().segment_len(len).build())?;
        }
        if let (Some(text), error) = parse("S2O_DENSE_BELOW", "a number of tokens or auto") {
            let below = if text == "auto" {
                DenseBelow::Auto
            } else {
                text.parse().map(DenseBelow::Tokens).map_err(|_| error)?
            };
            config = built("S2O_DENSE_BELOW", config.to_builder().dense_below(below).build())?;
        }
        let sparse = match variable("S2O_LAYERS") {
            None => Self::S2o(config),
            Some(file) => {
                if let (Some(_), error) = parse("S2O_TAU", "nothing beside S2O_LAYERS, which has the thresholds") {
                    return Err(error);
                }
                let settings = LayerSettings::load(Path::new(&file))
                    .map_err(|source| PolicyError::Layers { name: "S2O_LAYERS", source })?;
                Self::Layers { base: config, settings: Arc::new(settings) }
            }
        };
        match parse("S2O_OFF", "1, true, 0, false or nothing") {
            (Some(text), error) => match text.as_str() {
                "1" | "true" => Ok(Self::Dense),
                "" | "0" | "false" => Ok(sparse),
                _ => Err(error),
            },
            (None, _) => Ok(sparse),
        }
    }
}

fn built(name: &'static str, config: Result<S2oConfig, ConfigError>) -> Result<S2oConfig, PolicyError> {
    config.map_err(|source| PolicyError::Config { name, source })
}

/// Why the environment's policy was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The value does not parse.
    #[error("environment variable {name}: expected {expected}, got {got:?}")]
    Variable {
        /// Which variable.
        name: &'static str,
        /// What it may hold.
        expected: &'static str,
        /// What it holds.
        got: String,
    },
    /// The value parses, and the algorithm has no use for it.
    #[error("environment variable {name}: {source}")]
    Config {
        /// Which variable.
        name: &'static str,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// The file that the value names holds no settings by layer.
    #[error("environment variable {name}: {source}")]
    Layers {
        /// Which variable.
        name: &'static str,
        /// What is wrong with the file.
        source: LayerSettingsError,
    },
}

/// What one causal call computed and skipped.
#[derive(Debug, Clone, PartialEq)]
pub struct CallStats {
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Per head. A prompt that is below the policy's threshold has density 1.
    pub stats: AttnStats,
}

static CHOSEN: RwLock<Option<Policy>> = RwLock::new(None);
static INITIAL: OnceLock<Result<Policy, PolicyError>> = OnceLock::new();
/// `None` while nothing is collected.
static COLLECTED: Mutex<Option<Vec<CallStats>>> = Mutex::new(None);

/// Sets the policy of the whole process, from the next call on.
pub fn set_policy(policy: Policy) {
    *CHOSEN.write().unwrap_or_else(PoisonError::into_inner) = Some(policy);
    layer_count::restart_all();
}

/// Under [`Policy::Layers`], says that the next prefill call of this thread is the first layer's. For a prompt after a
/// prefill that ended early; without it the first call that differs from those before is an error.
pub fn begin_prompt() {
    layer_count::restart();
}

/// The policy in force.
///
/// # Errors
/// If none was set and the environment's is refused.
pub fn policy() -> Result<Policy, PolicyError> {
    if let Some(policy) = &*CHOSEN.read().unwrap_or_else(PoisonError::into_inner) {
        return Ok(policy.clone());
    }
    INITIAL.get_or_init(|| Policy::read(std::env::var_os)).clone()
}

/// Starts or ends the collection of statistics; what was collected and not taken is dropped. It is off at first. On a
/// GPU every sparse call then waits for the device, and what is collected grows until it is taken.
pub fn collect_stats(on: bool) {
    *COLLECTED.lock().unwrap_or_else(PoisonError::into_inner) = on.then(Vec::new);
}

/// Takes the statistics of the causal calls since the last time, in their order: with one model that is layer after
/// layer. Calls under [`Policy::Dense`] leave none.
pub fn take_stats() -> Vec<CallStats> {
    let mut collected = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
    collected.as_mut().map(std::mem::take).unwrap_or_default()
}

/// The options of the next layer, for a prefill call of `[batch, q_len, k_len]`.
pub(crate) fn next_layer(
    base: &S2oConfig,
    settings: &LayerSettings,
    lengths: [usize; 3],
) -> Result<S2oConfig, FlashAttnError> {
    let layer = layer_count::next_layer(settings.layers().len(), lengths)?;
    Ok(settings.config(layer, base)?)
}

/// A single query has come, which is exact under every policy. Only one that counts is asked whether it may: a policy that
/// cannot be is an error of causal calls alone.
pub(crate) fn single_query() -> Result<(), FlashAttnError> {
    match policy() {
        Ok(Policy::Layers { settings, .. }) => layer_count::single_query(settings.layers().len()),
        _ => Ok(()),
    }
}

/// S2O with the statistics that were asked for.
pub(crate) fn attend(op: S2oOp, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, FlashAttnError> {
    let collects = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    if !collects {
        return Ok(op.apply(q, k, v)?);
    }
    let (out, stats) = op.apply_with_stats(q, k, v)?;
    let call = CallStats { q_len: q.dim(1)?, k_len: k.dim(1)?, stats };
    if let Some(collected) = &mut *COLLECTED.lock().unwrap_or_else(PoisonError::into_inner) {
        collected.push(call);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Policy, PolicyError> {
        Policy::read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn an_empty_environment_is_the_default() {
        assert_eq!(read(&[]), Ok(Policy::default()));
        assert_eq!(read(&[("S2O_OFF", "0")]), Ok(Policy::default()));
        assert_eq!(read(&[("S2O_SEGMENT", "auto"), ("S2O_DENSE_BELOW", "auto")]), Ok(Policy::default()));
    }

    #[test]
    fn variables_are_read() {
        let config =
            S2oConfig::builder().tau(0.5).segment_len(SegmentLen::Fixed(1024)).dense_below(77).build().unwrap();
        let variables = [("S2O_TAU", "0.5"), ("S2O_SEGMENT", "1024"), ("S2O_DENSE_BELOW", "77")];
        assert_eq!(read(&variables), Ok(Policy::S2o(config)));
        assert_eq!(read(&[("S2O_OFF", "1")]), Ok(Policy::Dense));
    }

    #[test]
    fn a_file_has_the_thresholds_by_layer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layers.json");
        let settings =
            LayerSettings::new(TunedOn::default(), vec![LayerSetting::Dense, LayerSetting::Tau(0.1)]).unwrap();
        settings.save(&path).unwrap();
        let file = path.to_str().unwrap();
        let base = S2oConfig::builder().dense_below(77).build().unwrap();
        let expected = Policy::Layers { base, settings: Arc::new(settings) };
        assert_eq!(read(&[("S2O_LAYERS", file), ("S2O_DENSE_BELOW", "77")]), Ok(expected));
        assert_eq!(read(&[("S2O_LAYERS", file), ("S2O_OFF", "1")]), Ok(Policy::Dense));

        let error = read(&[("S2O_LAYERS", file), ("S2O_TAU", "0.1")]).unwrap_err().to_string();
        assert!(error.contains("S2O_TAU: expected nothing beside S2O_LAYERS") && error.contains("0.1"), "{error}");
        let error = read(&[("S2O_LAYERS", "no-such-file")]).unwrap_err().to_string();
        assert!(error.starts_with("environment variable S2O_LAYERS: no-such-file: "), "{error}");
    }

    #[test]
    fn bad_values_say_what_was_expected_and_got() {
        for (name, value, words) in [
            ("S2O_TAU", "x", "S2O_TAU: expected a number in [0, 1), got \"x\""),
            ("S2O_TAU", "1.5", "S2O_TAU: tau: expected a number in [0, 1), got 1.5"),
            ("S2O_TAU", "NaN", "S2O_TAU: tau: expected a number in [0, 1), got NaN"),
            ("S2O_SEGMENT", "-1", "S2O_SEGMENT: expected a number of tokens or auto, got \"-1\""),
            ("S2O_SEGMENT", "100", "S2O_SEGMENT: segment_len: expected a positive multiple of tile_q = 128, got 100"),
            ("S2O_DENSE_BELOW", "", "S2O_DENSE_BELOW: expected a number of tokens or auto, got \"\""),
            ("S2O_OFF", "maybe", "S2O_OFF: expected 1, true, 0, false or nothing, got \"maybe\""),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            assert_eq!(error, format!("environment variable {words}"));
        }
        assert!(read(&[("S2O_OFF", "1"), ("S2O_TAU", "x")]).is_err());
    }
}
