//! LongBench v2's score: the letter in the sentence that the prompt asks for.

use std::sync::LazyLock;

use regex::Regex;

static PATTERNS: LazyLock<[Regex; 2]> = LazyLock::new(|| {
    [r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"].map(|pattern| Regex::new(pattern).unwrap())
});

/// The letter that the prediction chooses after `The correct answer is`: in parentheses if the sentence occurs so,
/// otherwise without them. Asterisks are ignored. `None` if the sentence is missing, which counts as wrong.
pub fn choice(prediction: &str) -> Option<char> {
    let prediction = prediction.replace('*', "");
    let found = PATTERNS.iter().find_map(|pattern| pattern.captures(&prediction))?;
    found[1].chars().next()
}

pub(super) fn is_right(prediction: &str, references: &[String]) -> bool {
    choice(prediction).is_some_and(|letter| references.iter().any(|reference| reference.chars().eq([letter])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_with_and_without_parentheses() {
        assert_eq!(choice("The correct answer is (B)."), Some('B'));
        assert_eq!(choice("Well. **The correct answer is (C)**, because"), Some('C'));
        assert_eq!(choice("The correct answer is D"), Some('D'));
        assert_eq!(choice("The correct answer is A, no: The correct answer is (B)"), Some('B'));
    }

    #[test]
    fn anything_else_is_no_answer() {
        for prediction in
            ["", "B", "(B)", "the correct answer is (B)", "The correct answer is (E)", "The answer is (B)"]
        {
            assert_eq!(choice(prediction), None, "{prediction}");
        }
    }

    #[test]
    fn no_answer_is_wrong() {
        let references = ["B".to_owned()];
        assert!(is_right("The correct answer is (B)", &references));
        assert!(!is_right("The correct answer is (A)", &references));
        assert!(!is_right("B", &references));
    }
}
