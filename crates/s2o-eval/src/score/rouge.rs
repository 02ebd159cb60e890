//! ROUGE-Lsum: overlap of a prediction and a reference summary in the same order, sentence by sentence.

use std::collections::HashMap;

use super::overlap::f_measure;

pub(super) fn rouge_lsum(prediction: &str, reference: &str) -> f64 {
    let (prediction, reference) = (prediction.to_lowercase(), reference.to_lowercase());
    let (predicted, referenced) = (sentences(&prediction), sentences(&reference));
    let (mut left_predicted, mut left_referenced) = (counts(&predicted), counts(&referenced));
    let mut common = 0;
    for sentence in &referenced {
        let mut matched = vec![false; sentence.len()];
        predicted.iter().for_each(|other| mark_common(sentence, other, &mut matched));
        for word in sentence.iter().zip(&matched).filter(|(_, is_matched)| **is_matched).map(|(word, _)| word) {
            if let (Some(a @ 1..), Some(b @ 1..)) = (left_predicted.get_mut(word), left_referenced.get_mut(word)) {
                *a -= 1;
                *b -= 1;
                common += 1;
            }
        }
    }
    f_measure(common, predicted.iter().map(Vec::len).sum(), referenced.iter().map(Vec::len).sum())
}

fn sentences(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(words).collect()
}

fn words(line: &str) -> Vec<&str> {
    line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect()
}

fn counts<'a>(sentences: &[Vec<&'a str>]) -> HashMap<&'a str, usize> {
    let mut counts = HashMap::new();
    sentences.iter().flatten().for_each(|&word| *counts.entry(word).or_default() += 1);
    counts
}

/// Marks the words of `sentence` that are in one longest common subsequence with `other`. If there are several of that
/// length, the last word of `sentence` that the other does not need is dropped first, as in the reference program.
fn mark_common(sentence: &[&str], other: &[&str], matched: &mut [bool]) {
    let width = other.len() + 1;
    let mut lengths = vec![0_u32; (sentence.len() + 1) * width];
    for (i, word) in sentence.iter().enumerate() {
        for (j, other_word) in other.iter().enumerate() {
            lengths[(i + 1) * width + j + 1] = if word == other_word {
                lengths[i * width + j] + 1
            } else {
                lengths[i * width + j + 1].max(lengths[(i + 1) * width + j])
            };
        }
    }
    let (mut i, mut j) = (sentence.len(), other.len());
    while i > 0 && j > 0 {
        if sentence[i - 1] == other[j - 1] {
            matched[i - 1] = true;
            (i, j) = (i - 1, j - 1);
        } else if lengths[i * width + j - 1] > lengths[(i - 1) * width + j] {
            j -= 1;
        } else {
            i -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn order_counts_within_a_line() {
        // The common subsequence is "police the gunman" with 3 of 4 words on both sides.
        assert!(close(rouge_lsum("Police kill the gunman.", "police killed the gunman"), 0.75));
        // Here the common subsequence is only "the gunman".
        assert!(close(rouge_lsum("the gunman kill police", "police killed the gunman"), 0.5));
    }

    #[test]
    fn order_of_lines_does_not_count() {
        assert!(close(rouge_lsum("c d\na b", "a b\nc d"), 1.0));
        assert!(rouge_lsum("c d a b", "a b c d") < 1.0);
    }

    #[test]
    fn subsequences_with_several_lines_are_united() {
        // The example of Lin's paper: w1 w2 from the first line, w1 w3 w5 from the second make 4 of 5 words.
        let score = rouge_lsum("w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5");
        assert!(close(score, 2.0 * 4.0 / 15.0), "{score}");
    }

    #[test]
    fn a_word_counts_no_more_often_than_both_hold_it() {
        assert!(close(rouge_lsum("a", "a\na\na"), 2.0 / 4.0));
        assert!(close(rouge_lsum("a\na\na", "a"), 2.0 / 4.0));
    }

    #[test]
    fn of_the_longest_common_subsequences_one_is_marked() {
        let mut matched = [false; 4];
        // "a b" is in it three times; the search goes backwards.
        mark_common(&words("a b a b"), &words("c a c b"), &mut matched);
        assert_eq!(matched, [true, false, false, true]);
    }

    #[test]
    fn of_two_subsequences_of_equal_length_the_earlier_words_of_the_reference_count() {
        for (other, expected) in [("a b", [true, false]), ("b a", [true, true]), ("a", [false, true])] {
            let mut matched = [false; 2];
            mark_common(&["b", "a"], &words(other), &mut matched);
            assert_eq!(matched, expected, "{other}");
        }
        // With the lines apart, both words are found.
        assert!(close(rouge_lsum("a b", "b a"), 0.5) && close(rouge_lsum("a\nb", "b a"), 1.0));
    }

    #[test]
    fn nothing_scores_nothing() {
        for (prediction, reference) in [("", ""), ("", "a"), ("a", ""), ("...", "a"), ("b", "a")] {
            assert_eq!(rouge_lsum(prediction, reference), 0.0);
        }
    }

    proptest! {
        #[test]
        fn within_bounds_and_1_for_itself(a in "[a-c \\n]{0,30}", b in "[a-c \\n]{0,30}") {
            let score = rouge_lsum(&a, &b);
            prop_assert!((0.0..=1.0).contains(&score));
            prop_assert_eq!(rouge_lsum(&a, &a), if a.trim().is_empty() { 0.0 } else { 1.0 });
        }
    }
}
