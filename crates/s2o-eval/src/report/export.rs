//! Results in the formats of other projects.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::run::{Outcome, SampleResult};
use crate::tasks::Item;

/// A needle's result, in the format of needle-in-a-haystack plot scripts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahResult {
    /// The requested length in tokens.
    pub context_length: usize,
    /// Depth of the needle: 0 at the start, 100 at the end.
    pub depth_percent: f64,
    /// The generated text.
    pub response: String,
    /// The right answer.
    pub answer: String,
    /// Whether the answer was found.
    pub correct: bool,
    /// The seed of the item.
    pub seed: Option<u64>,
}

impl NiahResult {
    /// `None` for an outcome without a depth.
    pub fn of(outcome: &Outcome) -> Option<Self> {
        let SampleResult::Answer { prediction, references, score } = &outcome.result else { return None };
        Some(Self {
            context_length: outcome.context_tokens,
            depth_percent: outcome.depth? * 100.0,
            response: prediction.clone(),
            answer: references.join(", "),
            correct: *score == 1.0,
            seed: outcome.seed,
        })
    }
}

/// A line of RULER's prediction files, which its own script scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RulerPrediction {
    /// The item's number.
    pub index: u64,
    /// The generated text.
    pub pred: String,
    /// The prompt, without chat template.
    pub input: String,
    /// The right answers.
    pub outputs: Vec<String>,
    /// Always empty.
    pub others: BTreeMap<String, String>,
    /// Always -1, which means that nothing was cut.
    pub truncation: i64,
    /// Tokens of the prompt, chat template included.
    pub length: usize,
}

impl RulerPrediction {
    /// The line for the outcome of `item`; `None` for a passage.
    pub fn of(outcome: &Outcome, item: &Item) -> Option<Self> {
        let SampleResult::Answer { prediction, references, .. } = &outcome.result else { return None };
        Some(Self {
            index: outcome.index,
            pred: prediction.clone(),
            input: item.prompt.clone(),
            outputs: references.clone(),
            others: BTreeMap::new(),
            truncation: -1,
            length: outcome.prompt_tokens,
        })
    }
}
