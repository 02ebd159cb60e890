//! Results in the formats of other projects.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::run::{Outcome, SampleResult};
use crate::tasks::Item;

/// A needle's result, as the pictures of needles in haystacks are drawn from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahResult {
    /// The length in tokens that was asked for.
    pub context_length: usize,
    /// Where the needle is: 0 at the start, 100 at the end.
    pub depth_percent: f64,
    /// What the model generated.
    pub response: String,
    /// What was asked for.
    pub answer: String,
    /// Whether it came.
    pub correct: bool,
    /// What the item was made from.
    pub seed: Option<u64>,
}

impl NiahResult {
    /// None for an outcome without a depth.
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
    /// What the model generated.
    pub pred: String,
    /// The prompt, without chat template.
    pub input: String,
    /// The right answers.
    pub outputs: Vec<String>,
    /// Empty here.
    pub others: BTreeMap<String, String>,
    /// -1: nothing was cut.
    pub truncation: i64,
    /// Tokens of the prompt, chat template included.
    pub length: usize,
}

impl RulerPrediction {
    /// The outcome of `item`; none for a passage's.
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
