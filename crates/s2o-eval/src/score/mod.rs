//! Scores of predictions, by the rules of the benchmarks.
//!
//! Every score is from 0 to 1. RULER and InfiniteBench report percent: a published 87.5 corresponds to a mean of 0.875.
//!
//! ```
//! use s2o_eval::score::Scorer;
//!
//! let references = ["1234567".to_owned(), "7654321".to_owned()];
//! assert_eq!(Scorer::StringMatchAll.score("They are 1234567 and 1111111.", &references), 0.5);
//! assert_eq!(Scorer::TokenF1.score("The Quick fox", &["a quick fox!".to_owned()]), 1.0);
//! ```

mod infinitebench;
mod overlap;
mod rouge;

use std::fmt;
use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

use overlap::{character_f1, token_f1};
use rouge::rouge_lsum;

/// The rule that scores an item. Its name in files is in snake case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scorer {
    /// RULER's needles, variables and words: the share of the references that occur in the prediction, in any case.
    StringMatchAll,
    /// RULER's question answering: 1 if any reference occurs in the prediction, in any case.
    StringMatchPart,
    /// The needle task by depth and length: whether a reference occurs in the prediction, in the same case.
    Substring,
    /// needle-7m: whether the prediction up to its first full stop, without surrounding spaces, is a reference.
    FirstSentence,
    /// LongBench v2: whether the letter after `The correct answer is` is a reference. It is in parentheses if the
    /// sentence occurs so, otherwise without them. Asterisks are ignored. An answer without this sentence is wrong.
    LongbenchChoice,
    /// InfiniteBench's pass keys and numbers: whether the first run of digits equals a reference.
    FirstInteger,
    /// InfiniteBench's key-value retrieval: whether a reference is a word of the prediction. Punctuation counts as
    /// white space.
    KeyValue,
    /// InfiniteBench's choices about books: whether the prediction chooses a reference, which may be the letter or the
    /// option's text. The choice is the first character if it is A, B, C or D; otherwise the text after `answer is:`,
    /// `answer:`, `answer is` or `option is`; otherwise the first of these letters that stands alone.
    BookChoice,
    /// InfiniteBench's dialogues: as [`Self::KeyValue`], both in upper case.
    Dialogue,
    /// InfiniteBench's English questions: the best F1 over the references of the words that both texts share, without
    /// case, punctuation and the articles a, an, the.
    TokenF1,
    /// InfiniteBench's Chinese questions: the best F1 over the references of the characters that both texts share,
    /// without case, punctuation (ASCII and Chinese) and white space.
    CharacterF1,
    /// InfiniteBench's summaries: the best ROUGE-Lsum over the references, the F-measure of the summary-level longest
    /// common subsequences. Lines are the sentences. Words are runs of ASCII letters and digits without case and
    /// without stemming. For each reference line, the words in a longest common subsequence with any predicted line
    /// count, each at most as often as both texts contain it.
    RougeLsum,
    /// InfiniteBench's search for a number: whether the first number, with or without decimals, equals a reference.
    MathFind,
    /// InfiniteBench's search for a bug: whether the prediction names a reference: the function with the bug, or its
    /// letter. The first of the letters A to J that stands alone decides if it is right. Otherwise the text after
    /// `answer is:`, `is:` or `answer:` decides.
    CodeDebug,
    /// InfiniteBench's simulated code: whether the last word equals the integer of a reference. Punctuation counts as
    /// white space.
    CodeRun,
}

impl Scorer {
    /// The score of `prediction` for the right answers `references`, from 0 to 1. An empty prediction scores 0.
    pub fn score(self, prediction: &str, references: &[String]) -> f64 {
        let best = |score: fn(&str, &str) -> f64| {
            references.iter().map(|reference| score(prediction, reference)).fold(0.0, f64::max)
        };
        let correct = match self {
            Self::StringMatchAll => return found(prediction, references) as f64 / references.len().max(1) as f64,
            Self::TokenF1 => return best(token_f1),
            Self::CharacterF1 => return best(character_f1),
            Self::RougeLsum => return best(rouge_lsum),
            Self::StringMatchPart => found(prediction, references) > 0,
            Self::Substring => {
                references.iter().any(|reference| !reference.is_empty() && prediction.contains(reference))
            }
            Self::FirstSentence => {
                let answer = s2o_models::passkey::answer(prediction);
                !answer.is_empty() && references.iter().any(|reference| reference == answer)
            }
            Self::LongbenchChoice => {
                let choice = choice(&prediction.replace('*', ""));
                choice.is_some_and(|letter| references.contains(&letter))
            }
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

/// Whether a prediction begins with a reference, in any case, after white space and the number of a list (`1.`). Sparse
/// attention decides only the first token of an answer; dense decoding can find what the prefill lost in later ones.
pub fn begins_right(prediction: &str, references: &[String]) -> bool {
    let text = prediction.trim_start().to_lowercase();
    let item = text.strip_prefix("1.").map_or("", str::trim_start);
    let begin = references.iter().filter(|reference| !reference.is_empty()).map(|reference| reference.to_lowercase());
    begin.into_iter().any(|begin| text.starts_with(&begin) || item.starts_with(&begin))
}

/// The number of references in the prediction by RULER's rules: control characters are line ends, and case is ignored.
fn found(prediction: &str, references: &[String]) -> usize {
    let text: String = prediction.chars().map(|c| if c <= '\x1f' { '\n' } else { c }).collect();
    let text = text.trim().to_lowercase();
    references.iter().filter(|reference| !reference.is_empty() && text.contains(&reference.to_lowercase())).count()
}

/// The letter that a prediction chooses by LongBench v2's rule.
fn choice(prediction: &str) -> Option<String> {
    static PATTERNS: LazyLock<[Regex; 2]> = LazyLock::new(|| {
        [r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"].map(|p| Regex::new(p).unwrap())
    });
    PATTERNS.iter().find_map(|pattern| Some(pattern.captures(prediction)?[1].to_owned()))
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
    fn predictions_score_by_their_rules() {
        const RULER: &[&str] = &["ABCDE", "fghij", "42", "x y"];
        for (scorer, references, prediction, expected) in [
            (Scorer::Substring, &["7654321"][..], "The special magic Oslo number is: 7654321", 1.0),
            (Scorer::Substring, &["7654321"], "76543210 or so", 1.0),
            (Scorer::Substring, &["7654321"], "765432", 0.0),
            // The demo model's answer ends at the first full stop.
            (Scorer::FirstSentence, &["7654321"], " 7654321.\nThe grass", 1.0),
            (Scorer::FirstSentence, &["7654321"], "7654321", 1.0),
            (Scorer::FirstSentence, &["7654321"], " 76543210.", 0.0),
            (Scorer::FirstSentence, &["7654321"], "It is 7654321.", 0.0),
            (Scorer::FirstSentence, &["7654321"], ". 7654321", 0.0),
            // The best reference counts.
            (Scorer::TokenF1, &["blue", "the red fox"], "Red fox.", 1.0),
            (Scorer::CharacterF1, &["红", "蓝色"], "蓝色。", 1.0),
            (Scorer::RougeLsum, &["blue", "red fox"], "Red fox.", 1.0),
            (Scorer::StringMatchAll, RULER, " abcde FGHIJ 42 x y", 1.0),
            (Scorer::StringMatchAll, RULER, "1. Abcde\n2. 421", 0.5),
            (Scorer::StringMatchAll, RULER, "none", 0.0),
            (Scorer::StringMatchPart, RULER, "It is fghij.", 1.0),
            (Scorer::StringMatchPart, RULER, "It is fghi j.", 0.0),
            // Control characters separate, up to U+001F; a space is none.
            (Scorer::StringMatchPart, &["x\ny"], "x\0y", 1.0),
            (Scorer::StringMatchPart, &["x\ny"], "x\u{1f}y", 1.0),
            (Scorer::StringMatchPart, &["x\ny"], "x y", 0.0),
            (Scorer::StringMatchPart, &["x y"], "x y", 1.0),
            // The ends are trimmed, also of line ends that were control characters.
            (Scorer::StringMatchPart, &["\nx"], "\0x", 0.0),
            (Scorer::StringMatchPart, &["x\n"], "x\u{1f} ", 0.0),
            (Scorer::StringMatchPart, &["xy"], "x\0y", 0.0),
            (Scorer::LongbenchChoice, &["B"], "The correct answer is (B).", 1.0),
            (Scorer::LongbenchChoice, &["C"], "Well. **The correct answer is (C)**, because", 1.0),
            (Scorer::LongbenchChoice, &["D"], "The correct answer is D", 1.0),
            (Scorer::LongbenchChoice, &["A"], "The correct answer is *A*", 1.0),
            (Scorer::LongbenchChoice, &["A"], "The correct answer is **(A)**", 1.0),
            (Scorer::LongbenchChoice, &["E"], "The correct answer is E", 0.0),
            // Brackets come before a bare letter, wherever they are.
            (Scorer::LongbenchChoice, &["C"], "The correct answer is B. The correct answer is (C)", 1.0),
            (Scorer::LongbenchChoice, &["B"], "The correct answer is A, no: The correct answer is (B)", 1.0),
            (Scorer::LongbenchChoice, &["B"], "The correct answer is (A)", 0.0),
            (Scorer::LongbenchChoice, &["B"], "B", 0.0),
            (Scorer::LongbenchChoice, &["B"], "(B)", 0.0),
            (Scorer::LongbenchChoice, &["B"], "the correct answer is (B)", 0.0),
            (Scorer::LongbenchChoice, &["E"], "The correct answer is (E)", 0.0),
            (Scorer::LongbenchChoice, &["B"], "The answer is (B)", 0.0),
        ] {
            assert_eq!(score(scorer, references, prediction), expected, "{scorer}: {prediction}");
        }
    }

    #[test]
    fn names_in_files_are_shown() {
        assert_eq!(Scorer::StringMatchAll.to_string(), "string_match_all");
        for scorer in ALL {
            assert_eq!(serde_json::to_string(&scorer).unwrap(), format!("\"{scorer}\""));
        }
    }

    #[test]
    fn an_answer_begins_right_or_not() {
        let references = ["Abc".to_owned(), "1.5".to_owned(), String::new()];
        for (prediction, expected) in [
            (" abc, x", true),
            ("1. ABC 2. x", true),
            (" 1.5", true),
            ("1. 1.5", true),
            (" is abc", false),
            (" ab", false),
            ("", false),
        ] {
            assert_eq!(begins_right(prediction, &references), expected, "{prediction:?}");
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
