//! [`Outcome`]: what one method made of one sample.

use serde::{Deserialize, Serialize};

use crate::tasks::ChatTemplate;

/// What a run varies beside samples and methods.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Setting {
    /// The model's name.
    pub model: String,
    /// Its precision: `f32`, `bf16` or `f16`.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// What went around the prompts.
    pub template: ChatTemplate,
    /// Tokens per prefill chunk as they were asked for: a number, `whole` or `auto`.
    pub chunk: String,
}

/// What tells outcomes apart: a run has one for each.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The sample's id.
    pub sample: String,
    /// The method as it was asked for. A text, so that a table of a method that has gone can still be made.
    pub method: String,
    /// Everything else.
    #[serde(flatten)]
    pub setting: Setting,
}

/// What one method made of one sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Sample, method and setting.
    #[serde(flatten)]
    pub key: Key,
    /// A digest of a sample that was read from a file, so that another file under the same name is noticed.
    #[serde(default)]
    pub digest: Option<String>,
    /// The task's name.
    pub task: String,
    /// As [`crate::tasks::Item::groups`].
    #[serde(default)]
    pub groups: Vec<String>,
    /// The length in tokens that was asked for.
    pub context_tokens: usize,
    /// Where the fact asked for is, if it is at one place.
    pub depth: Option<f64>,
    /// As [`crate::tasks::Item::index`].
    pub index: u64,
    /// As [`crate::tasks::Item::seed`].
    pub seed: Option<u64>,
    /// Tokens of the prompt, chat template and answer prefix included.
    pub prompt_tokens: usize,
    /// Share of the causal tiles that were computed, over all layers.
    pub density: f64,
    /// The same of each layer.
    pub layer_density: Vec<f64>,
    /// Wall time of the prefill.
    pub prefill_seconds: f64,
    /// What came out.
    #[serde(flatten)]
    pub result: SampleResult,
}

/// What comes out of a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SampleResult {
    /// Of an item.
    Answer {
        /// What the model generated.
        prediction: String,
        /// The right answers.
        references: Vec<String>,
        /// From 0 to 1, by the item's scorer.
        score: f64,
    },
    /// Of a passage.
    Perplexity {
        /// Mean negative log-likelihood of the tokens, in nats.
        loss: f64,
        /// The likeliest token at each position.
        likeliest: Vec<u32>,
    },
}

impl Outcome {
    /// The score; none for a passage.
    pub fn score(&self) -> Option<f64> {
        match self.result {
            SampleResult::Answer { score, .. } => Some(score),
            SampleResult::Perplexity { .. } => None,
        }
    }
}
