//! Scores of predictions, by the rules of the benchmarks.
//!
//! Every score is from 0 to 1. RULER and InfiniteBench report percent: a published 87.5 corresponds to a mean of 0.875.
//!
//! ```
//! use s2o_eval::score::{ruler, token_f1};
//!
//! let references = ["1234567".to_owned(), "7654321".to_owned()];
//! assert_eq!(ruler::string_match_all("They are 1234567 and 1111111.", &references), 0.5);
//! assert_eq!(token_f1("The Quick fox", "a quick fox!"), 1.0);
//! ```

pub mod infinitebench;
pub mod longbench_v2;
mod overlap;
mod rouge;
pub mod ruler;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use overlap::{character_f1, token_f1};
pub use rouge::rouge_lsum;

/// The rule that scores an item. Its name in files is in snake case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scorer {
    /// RULER's needles, variables and words: [`ruler::string_match_all`].
    StringMatchAll,
    /// RULER's question answering: [`ruler::string_match_part`].
    StringMatchPart,
    /// The needle task by depth and length: [`substring`].
    Substring,
    /// needle-7m: [`first_sentence`].
    FirstSentence,
    /// LongBench v2: [`longbench_v2::choice`].
    LongbenchChoice,
    /// InfiniteBench's pass keys and numbers: [`infinitebench::first_integer`].
    FirstInteger,
    /// InfiniteBench's key-value retrieval: [`infinitebench::key_value`].
    KeyValue,
    /// InfiniteBench's choices about books: [`infinitebench::book_choice`].
    BookChoice,
    /// InfiniteBench's dialogues: [`infinitebench::dialogue`].
    Dialogue,
    /// InfiniteBench's English questions: the best [`token_f1`] over the references.
    TokenF1,
    /// InfiniteBench's Chinese questions: the best [`character_f1`] over the references.
    CharacterF1,
    /// InfiniteBench's summaries: the best [`rouge_lsum`] over the references.
    RougeLsum,
    /// InfiniteBench's search for a number: [`infinitebench::math_find`].
    MathFind,
    /// InfiniteBench's search for a bug: [`infinitebench::code_debug`].
    CodeDebug,
    /// InfiniteBench's simulated code: [`infinitebench::code_run`].
    CodeRun,
}

impl Scorer {
    /// The score of `prediction` for the right answers `references`, from 0 to 1. An empty prediction scores 0.
    pub fn score(self, prediction: &str, references: &[String]) -> f64 {
        let best = |score: fn(&str, &str) -> f64| {
            references.iter().map(|reference| score(prediction, reference)).fold(0.0, f64::max)
        };
        let correct = match self {
            Self::StringMatchAll => return ruler::string_match_all(prediction, references),
            Self::TokenF1 => return best(token_f1),
            Self::CharacterF1 => return best(character_f1),
            Self::RougeLsum => return best(rouge_lsum),
            Self::StringMatchPart => return ruler::string_match_part(prediction, references),
            Self::Substring => substring(prediction, references),
            Self::FirstSentence => first_sentence(prediction, references),
            Self::LongbenchChoice => longbench_v2::is_right(prediction, references),
            Self::FirstInteger => infinitebench::first_integer(prediction, references),
            Self::KeyValue => infinitebench::key_value(prediction, references),
            Self::BookChoice => infinitebench::book_choice(prediction, references),
            Self::Dialogue => infinitebench::dialogue(prediction, references),
            Self::MathFind => infinitebench::math_find(prediction, references),
            Self::CodeDebug => infinitebench::code_debug(prediction, references),
            Self::CodeRun => infinitebench::code_run(prediction, references),
        };
        f64::from(u8::from(correct))
    }
}

impl fmt::Display for Scorer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Whether a reference occurs anywhere in the prediction, with the same case.
pub fn substring(prediction: &str, references: &[String]) -> bool {
    references.iter().any(|reference| !reference.is_empty() && prediction.contains(reference.as_str()))
}

/// Whether the prediction up to its first full stop, without surrounding spaces, is a reference.
pub fn first_sentence(prediction: &str, references: &[String]) -> bool {
    let answer = s2o_models::passkey::answer(prediction);
    !answer.is_empty() && references.iter().any(|reference| reference == answer)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Scorer; 15] = [
        Scorer::StringMatchAll,
        Scorer::StringMatchPart,
        Scorer::Substring,
        Scorer::FirstSentence,
        Scorer::LongbenchChoice,
        Scorer::FirstInteger,
        Scorer::KeyValue,
        Scorer::BookChoice,
        Scorer::Dialogue,
        Scorer::TokenF1,
        Scorer::CharacterF1,
        Scorer::RougeLsum,
        Scorer::MathFind,
        Scorer::CodeDebug,
        Scorer::CodeRun,
    ];

    fn score(scorer: Scorer, references: &[&str], prediction: &str) -> f64 {
        let references: Vec<String> = references.iter().map(|&reference| reference.into()).collect();
        scorer.score(prediction, &references)
    }

    #[test]
    fn a_needle_counts_anywhere() {
        let score = |prediction| score(Scorer::Substring, &["7654321"], prediction);
        assert_eq!(score("The special magic Oslo number is: 7654321"), 1.0);
        assert_eq!(score("76543210 or so"), 1.0);
        assert_eq!(score("765432"), 0.0);
        assert_eq!(score(""), 0.0);
    }

    #[test]
    fn the_demo_models_answer_ends_at_the_first_full_stop() {
        let score = |prediction| score(Scorer::FirstSentence, &["7654321"], prediction);
        assert_eq!(score(" 7654321.\nThe grass"), 1.0);
        assert_eq!(score("7654321"), 1.0);
        assert_eq!(score(" 76543210."), 0.0);
        assert_eq!(score("It is 7654321."), 0.0);
        assert_eq!(score(". 7654321"), 0.0);
    }

    #[test]
    fn the_best_reference_counts() {
        assert_eq!(score(Scorer::TokenF1, &["blue", "the red fox"], "Red fox."), 1.0);
        assert_eq!(score(Scorer::CharacterF1, &["红", "蓝色"], "蓝色。"), 1.0);
        assert_eq!(score(Scorer::RougeLsum, &["blue", "red fox"], "Red fox."), 1.0);
    }

    #[test]
    fn names_in_files_are_shown() {
        assert_eq!(Scorer::StringMatchAll.to_string(), "string_match_all");
        for scorer in ALL {
            assert_eq!(serde_json::to_string(&scorer).unwrap(), format!("\"{scorer}\""));
        }
    }

    proptest! {
        #[test]
        fn scores_are_between_0_and_1(
            prediction in "(.|\\n|answer is: |The correct answer is \\([A-D]\\)| [A-D] |[0-9]{1,4}){0,20}",
            references in prop::collection::vec("[A-Da-z0-9 ]{0,6}", 0..4),
        ) {
            let references: Vec<&str> = references.iter().map(String::as_str).collect();
            for scorer in ALL {
                let got = score(scorer, &references, &prediction);
                prop_assert!((0.0..=1.0).contains(&got), "{} {}", scorer, got);
                prop_assert_eq!(score(scorer, &references, ""), 0.0, "{}", scorer);
                prop_assert_eq!(score(scorer, &[], &prediction), 0.0, "{}", scorer);
            }
        }
    }
}
