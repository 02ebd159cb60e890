//! The policy: which calls are sparse, for the whole process, and what was skipped.
//!
//! Until [`set_policy`] is called the environment decides, read once:
//!
//! | variable | |
//! |---|---|
//! | `S2O_TAU` | threshold in `[0, 1)`; 0 never stops early |
//! | `S2O_SEGMENT` | tokens in a segment, or `auto` |
//! | `S2O_DENSE_BELOW` | prompts below this many tokens are dense, or `auto`: the device's break-even |
//! | `S2O_OFF` | `1`: everything is dense |
//!
//! A value that cannot be is an error of every call, [`PolicyError`], until [`set_policy`] replaces it.

use std::ffi::OsString;
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use candle_core::Tensor;
use candle_s2o::S2oOp;
use thiserror::Error;

pub use candle_s2o::{AttnStats, ConfigError, DenseBelow, S2oConfig, S2oConfigBuilder, SegmentLen};

use crate::error::FlashAttnError;

/// How causal attention without window, ALiBi or softcap is computed.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// Exactly.
    Dense,
    /// By S2O, from prompts of [`S2oConfig::dense_below`] tokens on. Each call is taken for the end of its prompt.
    S2o(S2oConfig),
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
        match parse("S2O_OFF", "1, true, 0, false or nothing") {
            (Some(text), error) => match text.as_str() {
                "1" | "true" => Ok(Self::Dense),
                "" | "0" | "false" => Ok(Self::S2o(config)),
                _ => Err(error),
            },
            (None, _) => Ok(Self::S2o(config)),
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
