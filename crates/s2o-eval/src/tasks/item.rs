//! [`Item`]: one prompt with its references and the rule that scores it.

use super::ItemSpec;
use super::fitting::Draft;
use crate::score::Scorer;

/// One question to a model, made by a generator of [`super::ALL`] or read by [`crate::load`].
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Identifies the item: task, length, depth or index, and seed. The same item has the same id in every run.
    pub id: String,
    /// The task's name.
    pub task: String,
    /// Distinguishes items of the same task and length: counted from 0, or the number in the file.
    pub index: u64,
    /// The seed that it was made from; `None` for an item from a file.
    pub seed: Option<u64>,
    /// The user turn of a chat template: instruction, context and question.
    pub prompt: String,
    /// Beginning of the answer, after the chat template, so that the model only completes it. May be empty.
    pub answer_prefix: String,
    /// The right answers. The scorer decides how several are combined.
    pub references: Vec<String>,
    /// Number of tokens that the benchmark lets the model generate.
    pub max_new_tokens: usize,
    /// The rule that scores a prediction.
    pub scorer: Scorer,
    /// The requested length in tokens, an upper bound for prompt and answer prefix together.
    pub context_tokens: usize,
    /// Depth of the requested fact: 0 at the context's start, 1 at its end. `None` if it is not at one place.
    pub depth: Option<f64>,
    /// Groups whose mean is reported in addition to the total: difficulty and length for LongBench v2.
    pub groups: Vec<String>,
}

impl Item {
    /// The score of `prediction`, from 0 to 1.
    pub fn score(&self, prediction: &str) -> f64 {
        self.scorer.score(prediction, &self.references)
    }

    /// An item with the parts that every generated item has and defaults for the rest.
    pub(super) fn generated(task: &str, spec: &ItemSpec, draft: Draft, max_new_tokens: usize, scorer: Scorer) -> Self {
        Self {
            id: spec.id(task),
            task: task.to_owned(),
            index: spec.index,
            seed: Some(spec.seed),
            prompt: draft.prompt,
            answer_prefix: draft.answer_prefix,
            references: draft.references,
            ..Self::read(max_new_tokens, scorer, spec.num_tokens)
        }
    }

    /// An item of a file, whose texts the loader fills in.
    pub(crate) fn read(max_new_tokens: usize, scorer: Scorer, context_tokens: usize) -> Self {
        Self {
            id: String::new(),
            task: String::new(),
            index: 0,
            seed: None,
            prompt: String::new(),
            answer_prefix: String::new(),
            references: Vec::new(),
            max_new_tokens,
            scorer,
            context_tokens,
            depth: None,
            groups: Vec::new(),
        }
    }

    pub(super) fn at_depth(mut self, depth: f64) -> Self {
        self.depth = Some(depth);
        self
    }
}
