//! [`FlashAttnError`]: why a call was refused, and [`PolicyError`]: why the policy of the environment was.

use candle_core::DType;
use candle_s2o::{AttnError, ConfigError, LayerSettingsError, ValueError};
use thiserror::Error;

/// Why a call was refused. Candle's functions return [`candle_core::Error`]; it carries these words.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlashAttnError {
    /// The environment variables do not make a policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The sequence of calls is not one that a model with the settings' number of layers makes.
    #[error(
        "layer {layer} of the {num_layers} in the settings: expected {expected}, got {got}; the model has another \
         number of layers, or a prefill was broken off (s2o::begin_prompt); the count starts anew"
    )]
    LayerCount {
        /// Layers in the settings.
        num_layers: usize,
        /// The layer whose call was due.
        layer: usize,
        /// What was expected of it.
        expected: String,
        /// What came.
        got: String,
    },
    /// The settings by layer do not go with the call.
    #[error(transparent)]
    Layers(#[from] LayerSettingsError),
    /// The GPU kernels of this crate do not support the feature; an approximation is never returned in its place.
    #[error(
        "{what}: expected tensors on the CPU, got a CUDA device; this crate's kernels do plain and causal attention \
         only"
    )]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// A tensor other than q, k and v has a rank or size that does not fit the call.
    #[error("{name}: expected {expected}, got {got:?}")]
    Dims {
        /// Which tensor.
        name: &'static str,
        /// The dimensions that it should have.
        expected: String,
        /// Those it has.
        got: Vec<usize>,
    },
    /// A tensor other than q, k and v has a dtype that is not supported.
    #[error("{name}: expected dtype {expected}, got {got:?}")]
    DType {
        /// Which tensor.
        name: &'static str,
        /// The dtypes that it may have.
        expected: &'static str,
        /// The one it has.
        got: DType,
    },
    /// Cumulative lengths must not descend.
    #[error("{name}[{index}]: expected at least {previous} as the element before it, got {got}")]
    Descending {
        /// `seqlens_q` or `seqlens_k`.
        name: &'static str,
        /// Which element.
        index: usize,
        /// The one before it.
        previous: i64,
        /// Its value.
        got: i64,
    },
    /// A length or an index reaches beyond what is there.
    #[error("{name}: expected 0 to {max}, got {got}")]
    OutOfRange {
        /// Which number.
        name: &'static str,
        /// The largest that fits.
        max: usize,
        /// Its value.
        got: i64,
    },
    /// The tensors do not fit each other or the kernels.
    #[error(transparent)]
    Attn(#[from] AttnError),
}

/// Why the policy of the environment was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A variable that is not an option of [`S2oConfig`](candle_s2o::S2oConfig) has a value that it does not take.
    #[error("environment variable {name}: {reason}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// The values it takes, and the one it has.
        reason: ValueError,
    },
    /// A value is not one of the option's, or the options do not fit together.
    #[error("environment variable {names}: {source}")]
    Config {
        /// The variable, or all that were given, separated by commas.
        names: String,
        /// The reason.
        source: ConfigError,
    },
    /// The file that `S2O_LAYERS` names does not hold settings by layer.
    #[error("environment variable S2O_LAYERS: {0}")]
    Layers(#[from] LayerSettingsError),
}

impl From<candle_core::Error> for FlashAttnError {
    fn from(error: candle_core::Error) -> Self {
        Self::Attn(error.into())
    }
}

impl From<FlashAttnError> for candle_core::Error {
    fn from(error: FlashAttnError) -> Self {
        match error {
            FlashAttnError::Attn(error) => error.into(),
            other => Self::wrap(other),
        }
    }
}
