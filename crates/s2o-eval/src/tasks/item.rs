//! [`Item`]: one prompt with its references and the rule that scores it.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ItemSpec;
use super::fitting::Draft;
use crate::score::Scorer;

/// One question to a model, made by a generator of [`super::ALL`] or read by [`crate::load`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Identifies the item: task, length, depth or index, and seed. The same item has the same id in every run.
    pub id: String,
    /// The task's name.
    pub task: String,
    /// Distinguishes items of the same task and length: counted from 0, or the number in the file.
    #[serde(default)]
    pub index: u64,
    /// The seed that it was made from; `None` for an item from a file.
    #[serde(default)]
    pub seed: Option<u64>,
    /// The user turn of a chat template: instruction, context and question.
    pub prompt: String,
    /// Beginning of the answer, after the chat template, so that the model only completes it. May be empty.
    pub answer_prefix: String,
    /// The right answers. The scorer decides how several are combined.
    pub references: Vec<String>,
    /// The choices of a multiple-choice question in the order A, B, C, ...; empty otherwise.
    #[serde(default)]
    pub options: Vec<String>,
    /// Number of tokens that the benchmark lets the model generate.
    pub max_new_tokens: usize,
    /// The rule that scores a prediction.
    pub scorer: Scorer,
    /// The requested length in tokens, an upper bound for prompt and answer prefix together.
    pub context_tokens: usize,
    /// Depth of the requested fact: 0 at the context's start, 1 at its end. `None` if it is not at one place.
    pub depth: Option<f64>,
    /// Groups whose mean is reported in addition to the total: difficulty and length for LongBench v2.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Origin of the item.
    pub provenance: Origin,
}

/// Origin of an item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Made by this crate.
    Generated,
    /// Read from this file.
    File(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Generated => f.write_str("generated"),
            Self::File(path) => path.display().fmt(f),
        }
    }
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
            options: Vec::new(),
            max_new_tokens,
            scorer,
            context_tokens: spec.num_tokens,
            depth: None,
            groups: Vec::new(),
            provenance: Origin::Generated,
        }
    }

    pub(super) fn at_depth(mut self, depth: f64) -> Self {
        self.depth = Some(depth);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_json() {
        let draft = Draft { prompt: "p".into(), answer_prefix: " a".into(), references: vec!["r".into()] };
        let spec = ItemSpec::new(1024, 3).depth(0.25);
        let item = Item::generated("niah", &spec, draft, 32, Scorer::Substring).at_depth(0.25);
        let json = serde_json::to_string(&item).unwrap();
        assert_eq!(serde_json::from_str::<Item>(&json).unwrap(), item);
        assert!(json.contains(r#""scorer":"substring""#) && json.contains(r#""provenance":"generated""#), "{json}");
    }

    #[test]
    fn provenance_shows_the_file() {
        assert_eq!(Origin::Generated.to_string(), "generated");
        assert_eq!(Origin::File("data.json".into()).to_string(), "data.json");
    }
}
