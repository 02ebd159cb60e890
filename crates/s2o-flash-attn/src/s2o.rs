//! The process-wide policy that decides which calls are sparse, and the statistics of the sparse calls.
//!
//! Until [`set_policy`] is called, environment variables determine the policy. They are read once:
//!
//! | variable | meaning |
//! |---|---|
//! | `S2O_PRESET` | the options to start from: `default` or `paper` |
//! | `S2O_TAU`, `S2O_SEGMENT`, `S2O_STOP_RULE`, ... | each option of [`S2oConfig::OPTIONS`], by its name |
//! | `S2O_LAYERS` | a file of thresholds by layer ([`LayerSettings`]), in place of `S2O_TAU` |
//! | `S2O_OFF` | `1`: everything is dense |
//!
//! An invalid value makes every causal call fail with a [`PolicyError`] until [`set_policy`] replaces the policy.

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use candle_core::Tensor;
use candle_s2o::{PendingStats, Preset, S2oOp, break_even_of};

pub use candle_s2o::{
    AttnStats, ConfigError, DenseBelow, LayerSetting, LayerSettings, LayerSettingsError, S2oConfig, S2oConfigBuilder,
    SegmentLen, TunedOn, ValueError,
};

pub use crate::error::PolicyError;

use crate::error::FlashAttnError;
use crate::layer_count;

/// Method for causal attention without window or ALiBi.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// Exact attention.
    Dense,
    /// S2O for prompts of at least [`S2oConfig::dense_below`] tokens. Each call is treated as the end of its prompt.
    S2o(S2oConfig),
    /// S2O with a threshold for each layer. A call does not state its layer, so causal calls with more than one query
    /// are counted per thread, modulo the number of layers. Calls that a model with this number of layers cannot make
    /// are errors ([`FlashAttnError::LayerCount`]; docs/swap.md lists the cases that cannot be detected). A single
    /// query is exact.
    Layers {
        /// All options except the thresholds.
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
    /// The policy that the environment variables determine. `variable` returns the value of a variable.
    fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, PolicyError> {
        let text = |name: &str| variable(name).map(|text| text.to_string_lossy().trim().to_owned());
        let mut config = Preset::default().config();
        if let Some(text) = text("S2O_PRESET") {
            let preset: Preset = text.parse().map_err(|reason| PolicyError::Variable { name: "S2O_PRESET", reason })?;
            config = preset.config();
        }
        let (mut builder, mut given) = (config.to_builder(), Vec::new());
        for option in S2oConfig::OPTIONS {
            let name = format!("S2O_{}", option.name().to_uppercase().replace('-', "_"));
            if let Some(text) = text(&name) {
                let set = builder.set(option.name(), &text);
                builder = set.map_err(|source| PolicyError::Config { names: name.clone(), source })?;
                given.push(name);
            }
        }
        let config = builder.build().map_err(|source| PolicyError::Config { names: given.join(", "), source })?;
        let refuse = |name, expected, got| Err(PolicyError::Variable { name, reason: ValueError { expected, got } });
        let sparse = match (variable("S2O_LAYERS"), text("S2O_TAU")) {
            (None, _) => Self::S2o(config),
            (Some(_), Some(tau)) => {
                return refuse("S2O_TAU", "no value together with S2O_LAYERS, which has the thresholds", tau);
            }
            (Some(file), None) => {
                Self::Layers { base: config, settings: Arc::new(LayerSettings::load(Path::new(&file))?) }
            }
        };
        match text("S2O_OFF").unwrap_or_default().as_str() {
            "1" | "true" => Ok(Self::Dense),
            "" | "0" | "false" => Ok(sparse),
            got => refuse("S2O_OFF", "1, true, 0, false or nothing", got.to_owned()),
        }
    }
}

/// Statistics of one causal call.
#[derive(Debug, Clone, PartialEq)]
pub struct CallStats {
    /// Number of queries.
    pub q_len: usize,
    /// Number of keys.
    pub k_len: usize,
    /// Statistics of each head. A prompt shorter than [`S2oConfig::dense_below`] has density 1.
    pub stats: AttnStats,
}

static CHOSEN: RwLock<Option<Policy>> = RwLock::new(None);
static INITIAL: OnceLock<Result<Policy, PolicyError>> = OnceLock::new();
/// `None` while the collection is off.
static COLLECTED: Mutex<Option<Vec<PendingCall>>> = Mutex::new(None);

struct PendingCall {
    q_len: usize,
    k_len: usize,
    stats: PendingStats,
}

/// Sets the policy of the whole process, from the next call on.
pub fn set_policy(policy: Policy) {
    *CHOSEN.write().unwrap_or_else(PoisonError::into_inner) = Some(policy);
    layer_count::restart_all();
}

/// Under [`Policy::Layers`], declares that the next prefill call of this thread belongs to the first layer. Needed
/// before a prompt that follows an interrupted prefill; otherwise the first call with other lengths is an error.
pub fn begin_prompt() {
    layer_count::restart();
}

/// The policy in force.
///
/// # Errors
/// If no policy was set and the policy of the environment is refused.
pub fn policy() -> Result<Policy, PolicyError> {
    if let Some(policy) = &*CHOSEN.read().unwrap_or_else(PoisonError::into_inner) {
        return Ok(policy.clone());
    }
    INITIAL.get_or_init(|| Policy::read(|name| std::env::var_os(name))).clone()
}

/// Starts or ends the collection of statistics, which is off at first. Statistics not yet taken are dropped. They grow
/// until they are taken, those of a GPU in its memory. No call waits for them.
pub fn collect_stats(on: bool) {
    *COLLECTED.lock().unwrap_or_else(PoisonError::into_inner) = on.then(Vec::new);
}

/// Takes the statistics of the causal calls since the last `take_stats`, in call order: for a single model, layer after
/// layer. Calls under [`Policy::Dense`] have no statistics. Nor have calls shorter than [`S2oConfig::dense_below`] on a GPU, if
/// they have softcap, a head_dim above 128 or other sequences. Waits for a GPU.
///
/// # Errors
/// If the GPU failed.
pub fn take_stats() -> Result<Vec<CallStats>, FlashAttnError> {
    // The lock is released before the GPU is waited for.
    let calls = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(std::mem::take);
    let read = |PendingCall { q_len, k_len, stats }| Ok(CallStats { q_len, k_len, stats: stats.read()? });
    calls.unwrap_or_default().into_iter().map(read).collect()
}

/// The options of the next layer, for a prefill call with lengths `[batch, q_len, k_len]`.
pub(crate) fn next_layer(
    base: &S2oConfig,
    settings: &LayerSettings,
    lengths: [usize; 3],
) -> Result<S2oConfig, FlashAttnError> {
    let layer = layer_count::next_layer(settings.layers().len(), lengths)?;
    Ok(settings.config(layer, base)?)
}

/// Number of keys from which causal calls with queries `q` (.., head_dim) may be sparse; `None` if none is. With settings by
/// layer only calls of one sequence are, because the layer of a call is found by counting.
pub(crate) fn sparse_from(q: &Tensor, num_sequences: usize) -> Result<Option<usize>, FlashAttnError> {
    Ok(match policy()? {
        Policy::Layers { base, .. } if num_sequences == 1 => Some(base.dense_below().resolve(break_even_of(q)?)),
        Policy::S2o(config) => Some(config.dense_below().resolve(break_even_of(q)?)),
        Policy::Dense | Policy::Layers { .. } => None,
    })
}

/// Counts a call with a single query, which is exact under every policy. An invalid policy is not an error here. It
/// makes only causal calls fail.
pub(crate) fn single_query() -> Result<(), FlashAttnError> {
    match policy() {
        Ok(Policy::Layers { settings, .. }) => layer_count::single_query(settings.layers().len()),
        _ => Ok(()),
    }
}

/// Applies `op`, and collects its statistics if [`collect_stats`] is on.
pub(crate) fn apply(op: S2oOp, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, FlashAttnError> {
    let collects = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    if !collects {
        return Ok(op.apply(q, k, v)?);
    }
    let (out, stats) = op.apply_with_pending_stats(q, k, v)?;
    let call = PendingCall { q_len: q.dim(1)?, k_len: k.dim(1)?, stats };
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
        let built = |change: fn(S2oConfigBuilder) -> S2oConfigBuilder| {
            Ok(Policy::S2o(change(S2oConfig::builder()).build().unwrap()))
        };
        let variables = [("S2O_TAU", "0.5"), ("S2O_SEGMENT", " 1024"), ("S2O_DENSE_BELOW", "77")];
        let expected = built(|b| b.tau(0.5).segment_len(SegmentLen::Fixed(1024)).dense_below(77));
        assert_eq!(read(&variables), expected);
        // Valid together, but not separately.
        let variables = [("S2O_TILE_Q", "96"), ("S2O_SEGMENT", "384"), ("S2O_Q_PERM", "on"), ("S2O_STOP_RULE", "mean")];
        let expected = built(|b| {
            b.tile_q(96).segment_len(SegmentLen::Fixed(384)).q_perm(true).stop_rule(candle_s2o::StopRule::MeanRatio)
        });
        assert_eq!(read(&variables), expected);
        assert_eq!(read(&[("S2O_PRESET", "paper")]), Ok(Policy::S2o(S2oConfig::paper())));
        let paper = S2oConfig::paper().to_builder().tau(0.1).build().unwrap();
        assert_eq!(read(&[("S2O_PRESET", "paper"), ("S2O_TAU", "0.1")]), Ok(Policy::S2o(paper)));
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
        assert!(
            error.contains("S2O_TAU: expected no value together with S2O_LAYERS") && error.contains("0.1"),
            "{error}"
        );
        let error = read(&[("S2O_LAYERS", "no-such-file")]).unwrap_err().to_string();
        assert!(error.starts_with("environment variable S2O_LAYERS: no-such-file: "), "{error}");
    }

    #[test]
    fn bad_values_say_what_was_expected_and_got() {
        for (name, value, words) in [
            ("S2O_TAU", "x", "S2O_TAU: tau: expected `auto` or a number in [0, 1), got \"x\""),
            ("S2O_TAU", "", "S2O_TAU: tau: expected `auto` or a number in [0, 1), got \"\""),
            ("S2O_TAU", "1.5", "S2O_TAU: tau: expected a number in [0, 1), got 1.5"),
            ("S2O_TAU", "NaN", "S2O_TAU: tau: expected a number in [0, 1), got NaN"),
            ("S2O_SEGMENT", "-1", "S2O_SEGMENT: segment: expected `auto` or a number of tokens, got \"-1\""),
            ("S2O_SEGMENT", "100", "S2O_SEGMENT: segment: expected a positive multiple of tile-q = 128, got 100"),
            ("S2O_DENSE_BELOW", "", "S2O_DENSE_BELOW: dense-below: expected `auto` or a number of tokens, got \"\""),
            (
                "S2O_STOP_RULE",
                "none",
                "S2O_STOP_RULE: stop-rule: expected `auto` or `all` or `mean` or `sum` or `max-weight` or `mean-weight`, got \"none\"",
            ),
            ("S2O_PRESET", "best", "S2O_PRESET: expected `default` or `paper`, got \"best\""),
            ("S2O_OFF", "maybe", "S2O_OFF: expected 1, true, 0, false or nothing, got \"maybe\""),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            assert_eq!(error, format!("environment variable {words}"));
        }
        let error = read(&[("S2O_TAU", "2"), ("S2O_SEGMENT", "256")]).unwrap_err().to_string();
        assert_eq!(error, "environment variable S2O_TAU, S2O_SEGMENT: tau: expected a number in [0, 1), got 2");
        assert!(read(&[("S2O_OFF", "1"), ("S2O_TAU", "x")]).is_err());
    }
}
