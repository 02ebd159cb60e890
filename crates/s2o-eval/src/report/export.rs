//! Results in the formats of other projects.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::run::{Outcome, SampleResult};
use crate::tasks::Item;

#[derive(Serialize)]
struct NiahResult<'o> {
    context_length: usize,
    depth_percent: f64,
    response: &'o str,
    answer: String,
    correct: bool,
    seed: Option<u64>,
}

/// A needle's result, in the format of needle-in-a-haystack plot scripts; `None` for an outcome without a depth. The
/// depth is 0 at the start and 100 at the end.
pub fn niah_result(outcome: &Outcome) -> Option<impl Serialize> {
    let SampleResult::Answer { prediction, references, score } = &outcome.result else { return None };
    Some(NiahResult {
        context_length: outcome.context_tokens,
        depth_percent: outcome.depth? * 100.0,
        response: prediction,
        answer: references.join(", "),
        correct: *score == 1.0,
        seed: outcome.seed,
    })
}

#[derive(Serialize)]
struct RulerPrediction<'o> {
    index: u64,
    pred: &'o str,
    input: &'o str,
    outputs: &'o [String],
    others: BTreeMap<String, String>,
    truncation: i64,
    length: usize,
}

/// The line for the outcome of `item` in RULER's prediction files, which its own script scores; `None` for a passage.
/// The input is without chat template, the length with it; a truncation of -1 means that nothing was cut.
pub fn ruler_prediction<'o>(outcome: &'o Outcome, item: &'o Item) -> Option<impl Serialize + 'o> {
    let SampleResult::Answer { prediction, references, .. } = &outcome.result else { return None };
    Some(RulerPrediction {
        index: outcome.index,
        pred: prediction,
        input: &item.prompt,
        outputs: references,
        others: BTreeMap::new(),
        truncation: -1,
        length: outcome.prompt_tokens,
    })
}
