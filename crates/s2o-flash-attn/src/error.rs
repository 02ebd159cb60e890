//! [`FlashAttnError`] for refused calls, and [`PolicyError`] for a refused policy in the environment.

use candle_core::{DType, Tensor};
use candle_s2o::{AttnError, ConfigError, LayerSettingsError, ValueError};
use thiserror::Error;

/// The reason a call was refused. The functions of this crate return it as a [`candle_core::Error`] with this message.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum FlashAttnError {
    /// The environment variables do not specify a valid policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A model with the number of layers in the settings cannot make this sequence of calls.
    #[error(
        "layer {layer} of the {num_layers} in the settings: expected {expected}, got {got}; the model has a \
         different number of layers, or a prefill was interrupted (s2o::begin_prompt); counting restarts at layer 0"
    )]
    LayerCount { num_layers: usize, layer: usize, expected: String, got: String },
    /// The settings by layer do not fit the call.
    #[error(transparent)]
    Layers(#[from] LayerSettingsError),
    /// The GPU kernels are built for these head sizes.
    #[error("head_dim: expected a multiple of 8 up to 512 on CUDA, got {got}; the CPU path takes others")]
    HeadDim { got: usize },
    /// A tensor other than q, k and v has a rank or size that does not fit the call.
    #[error("{name}: expected {expected}, got {got:?}")]
    Dims { name: &'static str, expected: String, got: Vec<usize> },
    /// A tensor other than q, k and v has a dtype that is not supported.
    #[error("{name}: expected dtype {expected}, got {got:?}")]
    DType { name: &'static str, expected: &'static str, got: DType },
    /// Cumulative lengths must not descend.
    #[error("{name}[{index}]: expected at least {previous}, the element before it, got {got}")]
    Descending { name: &'static str, index: usize, previous: i64, got: i64 },
    /// A length or an index is out of range.
    #[error("{name}: expected 0 to {max}, got {got}")]
    OutOfRange { name: &'static str, max: usize, got: i64 },
    /// Scores capped to infinity or NaN would be NaN.
    #[error("softcap: expected a finite number, got {got}; 0 is no cap")]
    Softcap { got: f32 },
    /// The tensors do not fit each other or the kernels.
    #[error(transparent)]
    Attn(#[from] AttnError),
}

/// The reason the policy of the environment was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum PolicyError {
    /// A variable that is not an option of [`S2oConfig`](candle_s2o::S2oConfig) has an invalid value.
    #[error("environment variable {name}: {reason}")]
    Variable { name: &'static str, reason: ValueError },
    /// A value is not valid for its option, or the options do not fit together; `names` lists the variables at fault.
    #[error("environment variable {names}: {source}")]
    Config { names: String, source: ConfigError },
    /// The file that `S2O_LAYERS` names does not contain settings by layer.
    #[error("environment variable S2O_LAYERS: {0}")]
    Layers(#[from] LayerSettingsError),
}

impl FlashAttnError {
    pub(crate) fn dims(name: &'static str, expected: impl Into<String>, tensor: &Tensor) -> Self {
        Self::Dims { name, expected: expected.into(), got: tensor.dims().to_vec() }
    }
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
