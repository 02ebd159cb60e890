//! InfiniteBench's rules for right and wrong answers.

use std::sync::LazyLock;

use regex::Regex;

const CHOICES: [char; 4] = ['A', 'B', 'C', 'D'];

static NUMBER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"[0-9]+(\.[0-9]+)?").unwrap());

/// A letter that stands alone. Code debugging has up to ten options.
static LONE_LETTER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b[A-J]\b").unwrap());

pub(super) fn first_integer(prediction: &str, references: &[String]) -> bool {
    let first = prediction.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty());
    first.is_some_and(|digits| references.iter().any(|reference| reference == digits))
}

pub(super) fn key_value(prediction: &str, references: &[String]) -> bool {
    let spaced = spaced(prediction, "\n:\"'.,?!{}");
    spaced.split_whitespace().any(|word| references.iter().any(|reference| reference == word))
}

pub(super) fn dialogue(prediction: &str, references: &[String]) -> bool {
    let spaced = spaced(prediction, "\n:\"'.,?!{}").to_uppercase();
    spaced.split_whitespace().any(|word| references.iter().any(|reference| reference.to_uppercase() == word))
}

pub(super) fn book_choice(prediction: &str, references: &[String]) -> bool {
    let prediction = prediction.trim();
    let is_reference = |letter: char| references.iter().any(|reference| reference.chars().eq([letter]));
    if let Some(first) = prediction.chars().next().filter(|first| CHOICES.contains(first)) {
        return is_reference(first);
    }
    let words: Vec<&str> = prediction.split(|c: char| c == ' ' || "\n\"'.,?!{}".contains(c)).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    if let Some(rest) = after_first_prefix(&words.join(" "), &["answer is:", "answer:", "answer is", "option is"]) {
        return starts_with_any(rest, references);
    }
    let lone = words.iter().find_map(|word| CHOICES.into_iter().find(|&letter| word.chars().eq([letter])));
    lone.is_some_and(is_reference)
}

pub(super) fn code_debug(prediction: &str, references: &[String]) -> bool {
    let lone = LONE_LETTER.find(prediction);
    if lone.is_some_and(|letter| references.iter().any(|reference| reference == letter.as_str())) {
        return true;
    }
    let text = prediction.replace("Option", " ").replace("option", " ");
    let words = spaced(&text, "\n`'\"-*");
    let words: Vec<&str> = words.split(' ').filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    after_first_prefix(&text, &["answer is:", "is:", "answer:"]).is_some_and(|rest| starts_with_any(rest, references))
}

pub(super) fn code_run(prediction: &str, references: &[String]) -> bool {
    let spaced = spaced(prediction, "\n.`'\":");
    let last = spaced.split_whitespace().next_back().and_then(|word| word.parse::<i64>().ok());
    last.is_some_and(|value| references.iter().any(|reference| reference.trim().parse() == Ok(value)))
}

pub(super) fn math_find(prediction: &str, references: &[String]) -> bool {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let first = NUMBER.find(prediction).and_then(|found| number(found.as_str()));
    first.is_some_and(|value| references.iter().any(|reference| number(reference) == Some(value)))
}

fn spaced(text: &str, punctuation: &str) -> String {
    text.chars().map(|c| if punctuation.contains(c) { ' ' } else { c }).collect()
}

/// The text after the first of `prefixes` that occurs and after one more character, as in the benchmark.
fn after_first_prefix<'a>(text: &'a str, prefixes: &[&str]) -> Option<&'a str> {
    let (_, rest) = prefixes.iter().find_map(|prefix| text.split_once(prefix))?;
    let mut characters = rest.chars();
    characters.next();
    Some(characters.as_str())
}

fn starts_with_any(text: &str, references: &[String]) -> bool {
    references.iter().any(|reference| !reference.is_empty() && text.starts_with(reference.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rule = fn(&str, &[String]) -> bool;

    fn check(rule: Rule, references: &[&str], right: &[&str], wrong: &[&str]) {
        let references: Vec<String> = references.iter().map(|&reference| reference.to_owned()).collect();
        right.iter().for_each(|prediction| assert!(rule(prediction, &references), "{prediction:?} should be right"));
        wrong.iter().for_each(|prediction| assert!(!rule(prediction, &references), "{prediction:?} should be wrong"));
        assert!(!rule("", &references) && !rule("whatever", &[]));
    }

    #[test]
    fn first_integers() {
        check(
            first_integer,
            &["71432"],
            &["71432", " is 71432.", "71432, not 5"],
            &["5, then 71432", "714320", "none"],
        );
    }

    #[test]
    fn values_of_keys() {
        let right = ["ab-12", "\"ab-12\"", "It is: \"ab-12\".", "{x, ab-12}"];
        check(key_value, &["ab-12"], &right, &["ab-123", "ab", "AB-12"]);
    }

    #[test]
    fn speakers() {
        check(dialogue, &["JOHN"], &["John.", "I think \"john\"", "MARY, JOHN"], &["Johnny", "Mary"]);
    }

    #[test]
    fn choices_about_books() {
        let right = ["B", "B. Paris", " B", "The answer is: B", "the answer is B.", "Best option is Paris", "I say B"];
        let wrong = ["A", "C. B", "The answer is: C or B", "answer is", "Either A or B", "paris", "Barely"];
        check(book_choice, &["Paris", "B"], &right, &wrong[..6]);
        // The first character decides, even inside a word, as in the benchmark.
        check(book_choice, &["Paris", "B"], &["Barely"], &[]);
        check(
            book_choice,
            &["Paris"],
            &["option is Rome, answer: Paris", "x answer is Paris"],
            &["answer is Rome option is Paris"],
        );
    }

    #[test]
    fn functions_with_bugs() {
        let right = ["C", "C.", "C: because", "The answer is: sort_all", "the bug is: Option C", "Option C"];
        let wrong = ["D", "sort_all", "The answer is: sort_al", "answer:", "It is: D, not sort_all"];
        check(code_debug, &["sort_all", "C"], &right, &wrong);
        // Ten options, A to J.
        for letter in 'A'..='J' {
            check(code_debug, &["f", &letter.to_string()], &[&format!("It is {letter}")], &["It is K", "AJ"]);
        }
        check(code_debug, &["K"], &["answer: K"], &["K"]);
        // The first of the prefixes that occurs decides, not the first place.
        check(code_debug, &["f"], &["x is: g answer is: f", "is: f answer: g"], &["is: g answer: f"]);
    }

    #[test]
    fn results_of_code() {
        check(code_run, &["-12"], &["-12", "The value is: -12.", "`-12`"], &["12", "-12 or so", "minus"]);
    }

    #[test]
    fn numbers_in_lists() {
        check(math_find, &["7.5"], &["7.5", "It is 7.50", "x=7.5, 8"], &["7", "75", "8 then 7.5", "none"]);
        check(math_find, &["12"], &["12", "12.0", "=12."], &["1", "12.5", "120"]);
    }
}
