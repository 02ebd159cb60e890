//! Prompts in the words of needle-11m's training: lines hidden in English text, and a question about one of them.
//!
//! [`build`] and [`build_keyed`] make the same prompt for the same arguments on every machine. The haystack is the text
//! of [`s2o_models::passkey::haystack`] from a line that the seed chooses. After its end (about 1.2 million characters)
//! it starts again.

use rand::RngExt;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use s2o_models::passkey::HEADER;
use tokenizers::Tokenizer;

use super::fitting::Draft;
use super::haystack::{Essay, depths, hide};
use super::vocabulary::english_words;
use super::{Item, ItemSpec};
use crate::error::{EvalError, Result};
use crate::score::Scorer;

const NAME: &str = "passkey";
const QUESTION: &str = "What is the pass key? The pass key is";

/// A built prompt is less than this many tokens shorter than requested.
const SLACK: usize = 64;

/// Seven digits and a few words around them, with room for tokenizers that split them into more tokens.
const MAX_NEW_TOKENS: usize = 24;

/// More bytes than this per wanted token mean that the tokenizer makes no more tokens of the text.
const MAX_BYTES_PER_TOKEN: usize = 64;

/// A built prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PasskeyPrompt {
    /// The whole prompt: header, haystack with the needles on their own lines, question.
    pub text: String,
    /// Token ids of the text, special tokens included.
    pub tokens: Vec<u32>,
    /// The seven digits of the answer.
    pub answer: String,
}

/// Builds a passkey prompt of at most `num_tokens` tokens and more than `num_tokens - 64`, with the needle at `depth`
/// (0 right after the header, 1 right before the question).
///
/// # Errors
/// [`EvalError::ContextTooShort`] if header, needle and question alone are longer; [`EvalError::WrongInput`] for a
/// depth outside `0..=1`; [`EvalError::Tokenizer`], also if the tokenizer truncates.
pub fn build(tokenizer: &Tokenizer, num_tokens: usize, depth: f64, seed: u64) -> Result<PasskeyPrompt> {
    if !(0.0..=1.0).contains(&depth) {
        return Err(EvalError::wrong("depth of a passkey", "a number from 0 to 1", depth));
    }
    let mut random = SplitMix64::seed_from_u64(seed);
    let answer = number(&mut random);
    let needle = format!("The pass key is {answer}. Remember it. {answer} is the pass key.");
    let essay = Essay::from_line(random.next_u64())?;
    fitted(tokenizer, num_tokens, essay, &[(depth, needle)], QUESTION, answer)
}

/// Builds a prompt that hides `keys` needles of one form (a word and its number, each at its own place) and asks for
/// one of them. Its length is that of [`build`]. `seed` chooses words, numbers, places and the requested word.
///
/// # Errors
/// [`EvalError::ContextTooShort`] if header, needles and question alone are longer; [`EvalError::WrongInput`] if `keys`
/// is 0 or more than the haystack's words; [`EvalError::Tokenizer`].
pub fn build_keyed(tokenizer: &Tokenizer, num_tokens: usize, keys: usize, seed: u64) -> Result<PasskeyPrompt> {
    let mut words = english_words()?.to_vec();
    if keys == 0 || keys > words.len() {
        return Err(EvalError::wrong("keys to hide", format!("1 to {}", words.len()), keys));
    }
    let mut random = SplitMix64::seed_from_u64(seed);
    let chosen: Vec<&str> = (0..keys).map(|_| words.swap_remove(below(&mut random, words.len()))).collect();
    let asked = below(&mut random, keys);
    let numbers: Vec<String> = chosen.iter().map(|_| number(&mut random)).collect();
    let needles: Vec<(f64, String)> = chosen
        .iter()
        .zip(&numbers)
        .map(|(word, number)| {
            (below(&mut random, 1001) as f64 / 1000.0, format!("The special magic number for {word} is: {number}."))
        })
        .collect();
    let word = chosen[asked];
    let question = format!("What is the special magic number for {word}? The special magic number for {word} is:");
    let essay = Essay::from_line(random.next_u64())?;
    fitted(tokenizer, num_tokens, essay, &needles, &question, numbers[asked].clone())
}

/// A number below `bound`, as a remainder: its bias is below `bound / 2^64`.
fn below(random: &mut SplitMix64, bound: usize) -> usize {
    (random.next_u64() % bound as u64) as usize
}

fn number(random: &mut SplitMix64) -> String {
    (1_000_000 + below(random, 9_000_000)).to_string()
}

/// A prompt of at most `num_tokens` tokens, and less than [`SLACK`] tokens shorter.
fn fitted(
    tokenizer: &Tokenizer,
    num_tokens: usize,
    essay: Essay,
    needles: &[(f64, String)],
    question: &str,
    answer: String,
) -> Result<PasskeyPrompt> {
    let text = |body: &str| {
        let needles = needles.iter().map(|(depth, line)| (*depth, line.as_str()));
        format!("{HEADER}{}\n\n{question}", hide(body, needles))
    };
    let tokens = |text: &str| -> Result<Vec<u32>> {
        Ok(tokenizer.encode(text, true).map_err(EvalError::tokenizer)?.get_ids().to_vec())
    };
    let around = tokens(&text(""))?.len();
    if around > num_tokens {
        return Err(EvalError::ContextTooShort { task: NAME.to_owned(), expected: around, got: num_tokens });
    }
    // Token counts do not add up where texts meet, so the haystack's length is corrected until the whole prompt fits.
    let mut wanted = num_tokens - around;
    for _ in 0..16 {
        let text = text(&first_tokens(essay, tokenizer, wanted)?);
        let tokens = tokens(&text)?;
        if tokens.len() > num_tokens {
            wanted = wanted.saturating_sub(tokens.len() - num_tokens);
        } else if tokens.len() + SLACK <= num_tokens {
            wanted += num_tokens - tokens.len();
        } else {
            return Ok(PasskeyPrompt { text, tokens, answer });
        }
    }
    Err(EvalError::tokenizer(format!("no haystack makes a prompt of {num_tokens} tokens")))
}

/// The first characters of an essay that make `count` tokens.
fn first_tokens(essay: Essay, tokenizer: &Tokenizer, count: usize) -> Result<String> {
    let Some(last) = count.checked_sub(1) else { return Ok(String::new()) };
    let mut bytes = count * 5 + 256;
    loop {
        let mut text = essay.first_bytes(bytes);
        let encoding = tokenizer.encode(text.as_str(), false).map_err(EvalError::tokenizer)?;
        match encoding.get_offsets().get(last) {
            Some(&(_, end)) => {
                text.truncate((end..text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len()));
                return Ok(text);
            }
            None if encoding.is_empty() => return Err(EvalError::tokenizer("it makes no tokens of plain text")),
            None if bytes / MAX_BYTES_PER_TOKEN > count.max(64) => {
                let (got, len) = (encoding.len(), text.len());
                return Err(EvalError::tokenizer(format!(
                    "expected {count} tokens of {len} bytes of text, got {got}; switch off its truncation"
                )));
            }
            None => bytes *= 2,
        }
    }
}

pub(super) fn unkeyed(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let depth = depths(&mut random, 1, spec.depth)[0];
    Ok(item(name, spec, build(tokenizer, spec.num_tokens, depth, random.random()))?.at_depth(depth))
}

pub(super) fn keyed<const KEYS: usize>(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    item(name, spec, build_keyed(tokenizer, spec.num_tokens, KEYS, spec.random().random()))
}

/// Scored as InfiniteBench scores pass keys and numbers: the right digits in a different sentence count.
fn item(name: &'static str, spec: &ItemSpec, prompt: Result<PasskeyPrompt>) -> Result<Item> {
    let PasskeyPrompt { text, answer, .. } = prompt.map_err(|error| match error {
        EvalError::ContextTooShort { expected, got, .. } => {
            EvalError::ContextTooShort { task: name.to_owned(), expected, got }
        }
        other => other,
    })?;
    let (prompt, answer_prefix) = split_at_question(text);
    let draft = Draft { prompt, answer_prefix, references: vec![answer] };
    Ok(Item::generated(name, spec, draft, MAX_NEW_TOKENS, Scorer::FirstInteger))
}

/// The prompt up to its question, and the beginning of the answer that follows.
pub(crate) fn split_at_question(mut text: String) -> (String, String) {
    let answer_prefix = text.split_off(text.rfind('?').map_or(text.len(), |mark| mark + 1));
    (text, answer_prefix)
}

#[cfg(test)]
mod tests {
    use tokenizers::TruncationParams;

    use super::*;
    use crate::tasks::{generated, tokenizer_for_tests};

    #[test]
    fn a_tokenizer_that_truncates_ends_with_an_error() {
        let mut tokenizer = tokenizer_for_tests().clone();
        let truncation = TruncationParams { max_length: 32, ..Default::default() };
        tokenizer.with_truncation(Some(truncation)).unwrap();
        let error = build(&tokenizer, 1000, 0.5, 0).unwrap_err();
        assert!(error.to_string().ends_with("bytes of text, got 32; switch off its truncation"), "{error}");
    }

    #[test]
    fn words_are_the_demo_models() {
        let item = generated("passkey", 2048, 2);
        assert!(item.prompt.ends_with("\n\nWhat is the pass key?"));
        assert_eq!(item.answer_prefix, " The pass key is");
        let number = &item.references[0];
        assert!(item.prompt.contains(&format!("\nThe pass key is {number}. Remember it. {number} is the pass key.\n")));
    }

    #[test]
    fn keyed_prompts_hide_as_many_as_they_say() {
        for (task, keys) in [("keyed_1", 1), ("keyed_4", 4), ("keyed_16", 16)] {
            let item = generated(task, 2048, 2);
            assert_eq!(item.prompt.matches("\nThe special magic number for ").count(), keys, "{task}");
            let key = item.answer_prefix.strip_prefix(" The special magic number for ").unwrap();
            let key = key.strip_suffix(" is:").unwrap();
            assert!(item.prompt.contains(&format!("The special magic number for {key} is: {}.", item.references[0])));
        }
    }
}
