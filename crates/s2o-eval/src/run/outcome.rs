//! [`Outcome`]: the result of one method on one sample.

use serde::{Deserialize, Serialize};

use crate::score::begins_right;
use crate::tasks::ChatTemplate;

/// The parameters of a run besides samples and methods.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Setting {
    /// The model's name.
    pub model: String,
    /// Its precision: `f32`, `bf16` or `f16`.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The chat template.
    pub template: ChatTemplate,
    /// The requested tokens per prefill chunk: a number, `whole` or `auto`.
    pub chunk: String,
}

/// The key of an outcome. A run has one outcome for each key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The sample's id.
    pub sample: String,
    /// The method as requested. It is text, so that outcomes of a removed method can still be tabulated.
    pub method: String,
    /// All other parameters.
    #[serde(flatten)]
    pub setting: Setting,
}

/// The result of one method on one sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Sample, method and setting.
    #[serde(flatten)]
    pub key: Key,
    /// Digest of a sample that was read from a file, so that another file under the same name is detected.
    #[serde(default)]
    pub digest: Option<String>,
    /// The task's name.
    pub task: String,
    /// As [`crate::tasks::Item::groups`].
    #[serde(default)]
    pub groups: Vec<String>,
    /// The requested length in tokens.
    pub context_tokens: usize,
    /// Depth of the requested fact, if it is at one place.
    pub depth: Option<f64>,
    /// As [`crate::tasks::Item::index`].
    pub index: u64,
    /// As [`crate::tasks::Item::seed`].
    pub seed: Option<u64>,
    /// Tokens of the prompt, chat template and answer prefix included.
    pub prompt_tokens: usize,
    /// Share of the causal tiles that were computed, over all layers.
    pub density: f64,
    /// Density of each layer.
    pub layer_density: Vec<f64>,
    /// Wall time of the prefill, in seconds.
    pub prefill_seconds: f64,
    /// The answer or the perplexity.
    #[serde(flatten)]
    pub result: SampleResult,
}

/// The result of a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SampleResult {
    /// The result of an item.
    Answer {
        /// The generated text.
        prediction: String,
        /// The right answers.
        references: Vec<String>,
        /// Score from 0 to 1, by the item's scorer.
        score: f64,
    },
    /// The result of a passage.
    Perplexity {
        /// Mean negative log-likelihood of the tokens, in nats.
        loss: f64,
        /// The likeliest token at each position.
        likeliest: Vec<u32>,
    },
}

impl Outcome {
    /// What a number was expected to be and what it is, if it is impossible. A density may be above 1: a bound on the
    /// error can make S2O compute queries twice.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        let is_amount = |value: f64| value.is_finite() && value >= 0.0;
        if let Some(density) = self.layer_density.iter().chain([&self.density]).find(|density| !is_amount(**density)) {
            return Err(("a density >= 0", density.to_string()));
        }
        match &self.result {
            SampleResult::Answer { score, .. } if !(0.0..=1.0).contains(score) => {
                Err(("a score from 0 to 1", score.to_string()))
            }
            SampleResult::Perplexity { loss, .. } if !is_amount(*loss) => Err(("a loss >= 0", loss.to_string())),
            _ if !is_amount(self.prefill_seconds) => Err(("seconds >= 0", self.prefill_seconds.to_string())),
            _ => Ok(()),
        }
    }

    /// The score; `None` for a passage.
    pub fn score(&self) -> Option<f64> {
        match self.result {
            SampleResult::Answer { score, .. } => Some(score),
            SampleResult::Perplexity { .. } => None,
        }
    }

    /// The score if the answer begins with a reference, otherwise 0; `None` for a passage.
    pub fn strict_score(&self) -> Option<f64> {
        match &self.result {
            SampleResult::Answer { prediction, references, score } => {
                Some(if begins_right(prediction, references) { *score } else { 0.0 })
            }
            SampleResult::Perplexity { .. } => None,
        }
    }
}
