//! RULER's aggregation tasks: common words of a list, and frequent coded words.

use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use super::fitting::{Draft, fit};
use super::vocabulary::{Words, distinct, letters};
use super::{Item, ItemSpec};
use crate::error::Result;
use crate::score::Scorer;

const NUM_COMMON: usize = 10;

/// RULER's number of occurrences of each common and of each other word in the list.
const LONG: [usize; 2] = [30, 3];

/// Three hundred entries of common words leave no room for other words in a short prompt.
const SHORT: [usize; 2] = [10, 1];
const SHORT_BELOW: usize = 4096;

/// Occurrences in the worked example.
const EXAMPLE: [usize; 2] = [3, 1];
const EXAMPLE_OTHERS: usize = 10;

/// A numbered list with ten common words, after a short worked example.
pub(super) fn common_words(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let words = Words::shuffled(&mut random)?;
    let take = |from: usize, count: usize| (from..from + count).map(|i| words.get(i)).collect::<Vec<_>>();
    let (common, example_common) = (take(0, NUM_COMMON), take(NUM_COMMON, NUM_COMMON));
    let example_others = take(2 * NUM_COMMON, EXAMPLE_OTHERS);
    let others_from = 2 * NUM_COMMON + EXAMPLE_OTHERS;

    let answer_prefix = " Answer: The top 10 words that appear most often in the list are:";
    let example = format!(
        "{}{answer_prefix} {}",
        list_prompt(&numbered(&example_common, &example_others, EXAMPLE, &mut random)),
        numbered_once(&example_common)
    );
    let occurrences = if spec.num_tokens < SHORT_BELOW { SHORT } else { LONG };
    let draft = fit(name, tokenizer, spec.num_tokens, |others| {
        let list = numbered(&common, &take(others_from, others), occurrences, &mut random.clone());
        Draft {
            prompt: format!("{example}\n\n{}", list_prompt(&list)),
            answer_prefix: answer_prefix.to_owned(),
            references: common.clone(),
        }
    })?;
    Ok(Item::generated(name, spec, draft, 120, Scorer::StringMatchAll))
}

fn list_prompt(list: &str) -> String {
    format!(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that \
         appear most often.\n{list}\nQuestion: What are the 10 most common words in the above list?"
    )
}

/// `1. word 2. word ...` in random order, with the occurrences of each common and each other word.
fn numbered(common: &[String], others: &[String], occurrences: [usize; 2], random: &mut ChaCha8Rng) -> String {
    let [mut entries, others] =
        [(common, occurrences[0]), (others, occurrences[1])].map(|(words, n)| vec![words; n].concat());
    entries.extend(others);
    entries.shuffle(random);
    numbered_once(&entries)
}

fn numbered_once(words: &[String]) -> String {
    words.iter().enumerate().map(|(i, word)| format!("{}. {word}", i + 1)).collect::<Vec<_>>().join(" ")
}

const NUM_FREQUENT: usize = 3;

/// The most frequent entry, which the model has to ignore.
const DOTS: &str = "....";

/// Exponent of the Zipf distribution, and the sum over all ranks that normalizes it.
const ZIPF_EXPONENT: i32 = 2;
const ZIPF_SUM: f64 = std::f64::consts::PI * std::f64::consts::PI / 6.0;

/// With at least this many entries, the first five ranks have different frequencies.
const MIN_ENTRIES: usize = 100;

/// Coded words whose frequencies follow Zipf's law.
pub(super) fn frequent_words(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let random = spec.random();
    let draft = fit(name, tokenizer, spec.num_tokens, |more| {
        // Words are drawn rank by rank from the same random state, so that the answer does not depend on the length.
        let mut random = random.clone();
        let count = |rank: i32| ((MIN_ENTRIES + more) as f64 / f64::from(rank).powi(ZIPF_EXPONENT) / ZIPF_SUM) as usize;
        let counts: Vec<usize> = (1..).map(count).take_while(|count| *count > 0).collect();
        let mut words = vec![DOTS.to_owned()];
        words.extend(distinct(counts.len() - 1, || letters(&mut random, b"abcdefghijklmnopqrstuvwxyz", 6)));
        let mut entries: Vec<&str> =
            words.iter().zip(counts).flat_map(|(word, count)| std::iter::repeat_n(word.as_str(), count)).collect();
        entries.shuffle(&mut random);
        let text = entries.join(" ");
        Draft {
            prompt: format!(
                "Read the following coded text and track the frequency of each coded word. Find the three most \
                 frequently appeared coded words. {text}\nQuestion: Do not provide any explanation. Please ignore the \
                 dots '{DOTS}'. What are the three most frequently appeared words in the above coded text?"
            ),
            answer_prefix: " Answer: According to the coded text above, the three most frequently appeared words are:"
                .to_owned(),
            references: words[1..=NUM_FREQUENT].to_vec(),
        }
    })?;
    Ok(Item::generated(name, spec, draft, 50, Scorer::StringMatchAll))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::tasks::generated;

    fn most_frequent<'a>(words: impl Iterator<Item = &'a str>, count: usize) -> (HashSet<String>, usize, usize) {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        words.for_each(|word| *counts.entry(word).or_default() += 1);
        let mut counts: Vec<(usize, &str)> = counts.into_iter().map(|(word, count)| (count, word)).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top = counts[..count].iter().map(|&(_, word)| word.to_owned()).collect();
        (top, counts[count - 1].0, counts[count].0)
    }

    #[test]
    fn counting_the_list_gives_the_references() {
        for (num_tokens, common, other) in [(2048, 10, 1), (6000, 30, 3)] {
            let item = generated("cwe", num_tokens, 4);
            let (_, asked) = item.prompt.rsplit_once("most often.\n").unwrap();
            let (list, _) = asked.split_once("\nQuestion").unwrap();
            let words = list.split(' ').filter(|word| !word.ends_with('.'));
            let expected: HashSet<String> = item.references.iter().cloned().collect();
            assert_eq!(most_frequent(words, NUM_COMMON), (expected, common, other), "{num_tokens}");
        }
    }

    #[test]
    fn counting_the_coded_text_gives_the_references() {
        for num_tokens in [1024, 4096] {
            let item = generated("fwe", num_tokens, 4);
            let (_, rest) = item.prompt.split_once("coded words. ").unwrap();
            let (text, _) = rest.split_once("\nQuestion").unwrap();
            let expected: HashSet<String> = item.references.iter().cloned().collect();
            let (found, third, fourth) = most_frequent(text.split(' ').filter(|word| *word != DOTS), NUM_FREQUENT);
            assert_eq!(found, expected);
            assert!(third > fourth, "{third} {fourth}");
        }
    }

    #[test]
    fn the_worked_example_does_not_give_the_answer_away() {
        let item = generated("cwe", 2048, 4);
        let (example, _) = item.prompt.split_once("\n\n").unwrap();
        assert_eq!(item.score(example), 0.0);
    }
}
