//! The settings of SpargeAttn by layer and head, and the file that holds them.

use serde::{Deserialize, Serialize};

use crate::config_file::{LayerConfig, LayerEntry};
use crate::error::BaselineError;

/// The name of the method.
pub(crate) const NAME: &str = "spargeattn";

/// Settings of a model, as a tuner finds them. [`Sparge::from_config`](crate::Sparge::from_config) checks their values.
/// The file is JSON:
///
/// ```json
/// { "layers": { "0": { "heads": [{ "tau": 0.9, "theta": 0.5 }, { "tau": 1.0, "theta": 0.0 }], "lambda": -10.0 } } }
/// ```
pub type SpargeConfig = LayerConfig<SpargeLayer>;

impl LayerEntry for SpargeLayer {
    const CONTENT: &'static str = "settings of SpargeAttn by layer and head";
}

/// Settings of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpargeLayer {
    /// The settings of every query head.
    pub heads: Vec<SpargeHead>,
    /// Values are skipped if the scores are this far below the maximum (in nats, negative). `None` skips none.
    pub lambda: Option<f32>,
}

/// Settings of one head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpargeHead {
    /// The share of pooled attention to take; 1 takes everything.
    pub tau: f64,
    /// Blocks with a smaller self-similarity are always computed.
    pub theta: f64,
}

impl SpargeHead {
    pub(crate) fn check(self) -> Result<Self, BaselineError> {
        let Self { tau, theta } = self;
        BaselineError::unless(tau > 0.0 && tau <= 1.0, NAME, ["tau", "above 0, up to 1"], tau)?;
        BaselineError::unless((-1.0..=1.0).contains(&theta), NAME, ["theta", "-1 to 1"], theta)?;
        Ok(self)
    }
}

impl SpargeConfig {
    pub(crate) fn check(&self) -> Result<(), BaselineError> {
        for layer in self.layers.values() {
            check_lambda(layer.lambda)?;
            layer.heads.iter().try_for_each(|head| head.check().map(drop))?;
        }
        Ok(())
    }
}

pub(crate) fn check_lambda(lambda: Option<f32>) -> Result<(), BaselineError> {
    let Some(lambda) = lambda else { return Ok(()) };
    BaselineError::unless(lambda < 0.0, NAME, ["lambda", "below 0"], lambda)
}
