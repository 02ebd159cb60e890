//! Scores of predictions, by the rules of the benchmarks that the tasks come from.
//!
//! Every score is from 0 to 1. RULER and InfiniteBench report percent: a published 87.5 is a mean of 0.875 here.
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

pub use overlap::{character_f1, token_f1};
pub use rouge::rouge_lsum;

/// Whether a reference stands anywhere in the prediction, letter by letter.
pub fn substring(prediction: &str, references: &[String]) -> bool {
    references.iter().any(|reference| !reference.is_empty() && prediction.contains(reference.as_str()))
}

/// Whether the prediction up to its first full stop is a reference, spaces around it aside.
pub fn first_sentence(prediction: &str, references: &[String]) -> bool {
    let answer = s2o_models::passkey::answer(prediction);
    !answer.is_empty() && references.iter().any(|reference| reference == answer)
}
