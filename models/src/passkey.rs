//! Passkey prompts: a needle hidden in real text, and the question for it.
//!
//! The task that tells good token selection from bad: the answer hangs on one line anywhere in the context.

use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::error::{ModelError, Result};
use crate::model::encode;
use crate::random::SplitMix64;
use crate::weights::PASSKEY_JSONL;

const HEADER: &str = "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers afterwards.\n";
const QUESTION: &str = "What is the pass key? The pass key is";

/// How far below the wanted length a built prompt may end, in tokens.
const SLACK: usize = 64;

/// A prompt from the embedded `passkey.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PasskeyRecord {
    /// The whole prompt, question included.
    pub input: String,
    /// The digits that must come out.
    pub answer: String,
    /// `passkey`, `single-key` or `multi-key-4`.
    pub kind: String,
    /// Length in tokens of `needle-7m`'s tokenizer.
    pub tokens: usize,
    /// Where the needle is, 0 at the start and 1 at the end.
    pub depth: f64,
}

/// The embedded prompts: 20 near 4K and 10 near 32K tokens of `needle-7m`.
///
/// # Errors
/// [`ModelError::InvalidConfig`] when the embedded file is damaged.
pub fn records() -> Result<Vec<PasskeyRecord>> {
    PASSKEY_JSONL
        .lines()
        .map(|line| serde_json::from_str(line).map_err(|e| ModelError::config("passkey.jsonl", e)))
        .collect()
}

/// A built prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PasskeyPrompt {
    /// The whole prompt, question included.
    pub text: String,
    /// Its tokens, special tokens included.
    pub tokens: Vec<u32>,
    /// The seven digits that must come out.
    pub answer: String,
}

/// Builds a passkey prompt of at most `num_tokens` tokens and more than `num_tokens - 64`, with the needle at `depth`
/// (0 right after the header, 1 right before the question). The same for the same arguments, on every machine.
///
/// The haystack is the text of [`records`] without headers, needles and questions, from a place that `seed` chooses;
/// beyond its length (about 1.2 million characters) it starts again.
///
/// # Errors
/// [`ModelError::PromptTooShort`] when header, needle and question alone are longer; [`ModelError::WrongInput`] for a
/// depth outside `0..=1`.
pub fn build(tokenizer: &Tokenizer, num_tokens: usize, depth: f64, seed: u64) -> Result<PasskeyPrompt> {
    if !(0.0..=1.0).contains(&depth) {
        return Err(ModelError::WrongInput {
            what: "depth of a passkey",
            expected: "a number from 0 to 1".to_owned(),
            got: depth.to_string(),
        });
    }
    let mut random = SplitMix64::new(seed);
    let answer = number(&mut random);
    let line = format!("The pass key is {answer}. Remember it. {answer} is the pass key.");
    let place = random.next_u64();
    hide(tokenizer, num_tokens, &haystack()?, place, &[Needle { depth, line }], QUESTION, answer)
}

/// Builds a prompt that hides `keys` needles of one form (a word and its number, each at a place of its own) and asks for
/// one of them. Length and haystack are as in [`build`]; `seed` chooses words, numbers, places and which is asked for.
///
/// # Errors
/// [`ModelError::PromptTooShort`] when header, needles and question alone are longer; [`ModelError::WrongInput`] for no
/// keys, or for more than the haystack has words.
pub fn build_keyed(tokenizer: &Tokenizer, num_tokens: usize, keys: usize, seed: u64) -> Result<PasskeyPrompt> {
    let haystack = haystack()?;
    let mut words: Vec<&str> = haystack
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| (5..=9).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_lowercase()))
        .collect();
    words.sort_unstable();
    words.dedup();
    if keys == 0 || keys > words.len() {
        return Err(ModelError::WrongInput {
            what: "keys to hide",
            expected: format!("1 to {}", words.len()),
            got: keys.to_string(),
        });
    }
    let mut random = SplitMix64::new(seed);
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    let chosen: Vec<&str> = (0..keys).map(|_| words.swap_remove(below(words.len()))).collect();
    let asked = below(keys);
    let numbers: Vec<String> = chosen.iter().map(|_| number(&mut random)).collect();
    let needles: Vec<Needle> = chosen
        .iter()
        .zip(&numbers)
        .map(|(word, number)| Needle {
            depth: random.below(1001) as f64 / 1000.0,
            line: format!("The special magic number for {word} is: {number}."),
        })
        .collect();
    let word = chosen[asked];
    let question = format!("What is the special magic number for {word}? The special magic number for {word} is:");
    let (place, answer) = (random.next_u64(), numbers[asked].clone());
    hide(tokenizer, num_tokens, &haystack, place, &needles, &question, answer)
}

/// A line to hide, and where: 0 at the start of the haystack, 1 at its end.
struct Needle {
    depth: f64,
    line: String,
}

/// Seven digits.
fn number(random: &mut SplitMix64) -> String {
    (1_000_000 + random.below(9_000_000)).to_string()
}

/// The longest prompt of at most `num_tokens` tokens, give or take [`SLACK`], its haystack from a place that `place`
/// chooses.
fn hide(
    tokenizer: &Tokenizer,
    num_tokens: usize,
    haystack: &str,
    place: u64,
    needles: &[Needle],
    question: &str,
    answer: String,
) -> Result<PasskeyPrompt> {
    let haystack = Haystack::from_place(haystack, place);
    let around = encode(tokenizer, &assemble("", needles, question))?.len();
    if around > num_tokens {
        return Err(ModelError::PromptTooShort { expected: around, got: num_tokens });
    }
    // Tokens are not additive where texts meet, so the haystack's length is corrected until the whole prompt fits.
    let mut wanted = num_tokens - around;
    let mut body = haystack.of_tokens(tokenizer, wanted)?;
    for _ in 0..16 {
        let text = assemble(&body, needles, question);
        let tokens = encode(tokenizer, &text)?;
        if tokens.len() > num_tokens {
            wanted = wanted.saturating_sub((tokens.len() - num_tokens).max(1));
        } else if tokens.len() + SLACK <= num_tokens {
            wanted += num_tokens - tokens.len();
        } else {
            return Ok(PasskeyPrompt { text, tokens, answer });
        }
        body = haystack.of_tokens(tokenizer, wanted)?;
    }
    Err(ModelError::tokenizer(format!("no haystack makes a prompt of {num_tokens} tokens")))
}

/// The answer in a continuation by `needle-7m`'s rule: the text up to the first `.`, trimmed.
pub fn answer(generated: &str) -> &str {
    generated.split('.').next().unwrap_or_default().trim()
}

/// Whether a continuation answers right by `needle-7m`'s rule: the text up to the first `.`, trimmed, is the answer.
pub fn answers_exactly(generated: &str, answer: &str) -> bool {
    self::answer(generated) == answer
}

/// Whether a continuation holds the answer anywhere: the rule for models with words of their own.
pub fn answers(generated: &str, answer: &str) -> bool {
    generated.contains(answer)
}

/// Header, haystack with each needle on a line of its own, question.
fn assemble(body: &str, needles: &[Needle], question: &str) -> String {
    let place = |needle: &Needle| sentence_end_near(body, (body.len() as f64 * needle.depth) as usize);
    let mut placed: Vec<(usize, &str)> = needles.iter().map(|needle| (place(needle), needle.line.as_str())).collect();
    placed.sort_by_key(|&(at, _)| at);
    let (mut text, mut shown) = (HEADER.to_owned(), 0);
    for (at, line) in placed {
        text.push_str(&body[shown..at]);
        text.push_str(&format!("\n{line}\n"));
        shown = at;
    }
    text.push_str(&body[shown..]);
    text.push_str(&format!("\n\n{question}"));
    text
}

/// The nearest place around byte `at` where a line or a sentence ends, so that the needle splits no word.
fn sentence_end_near(text: &str, at: usize) -> usize {
    if at == 0 || at >= text.len() {
        return at.min(text.len());
    }
    let ends = |i: &usize| {
        let bytes = text.as_bytes();
        bytes[i - 1] == b'\n' || (bytes[*i] == b' ' && matches!(bytes[i - 1], b'.' | b'!' | b'?' | b':' | b';'))
    };
    let before = (1..=at).rev().find(ends).unwrap_or(0);
    let after = (at..text.len()).find(ends).unwrap_or(text.len());
    if at - before <= after - at { before } else { after }
}

/// All embedded prompts' text without header, needles and question: about 1.2 million characters of English.
///
/// # Errors
/// As [`records`].
pub fn haystack() -> Result<String> {
    let mut text = String::with_capacity(PASSKEY_JSONL.len());
    for record in records()? {
        let body = record.input.strip_prefix(HEADER).unwrap_or(&record.input);
        let body = body.rfind("\n\nWhat is the ").map_or(body, |question| &body[..question]);
        for line in body.split_inclusive('\n') {
            if !line.starts_with("The pass key is ") && !line.starts_with("The special magic number for ") {
                text.push_str(line);
            }
        }
        text.push('\n');
    }
    Ok(text)
}

/// Text without end.
struct Haystack {
    text: String,
}

impl Haystack {
    /// Turns the text so that it starts at a line that `place` chooses.
    fn from_place(text: &str, place: u64) -> Self {
        let starts: Vec<usize> = text.match_indices('\n').map(|(i, _)| i + 1).collect();
        let start = starts.get((place % starts.len().max(1) as u64) as usize).copied().unwrap_or(0);
        Self { text: [&text[start..], &text[..start]].concat() }
    }

    /// The first characters that make `count` tokens.
    fn of_tokens(&self, tokenizer: &Tokenizer, count: usize) -> Result<String> {
        if count == 0 {
            return Ok(String::new());
        }
        let mut bytes = count * 5 + 256;
        loop {
            let text: String = self.first_bytes(bytes);
            let encoding = tokenizer.encode(text.as_str(), false).map_err(ModelError::tokenizer)?;
            match encoding.get_offsets().get(count - 1) {
                Some(&(_, end)) => {
                    let end = (end..=text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len());
                    return Ok(text[..end].to_owned());
                }
                None if encoding.is_empty() => return Err(ModelError::tokenizer("it makes no tokens of plain text")),
                None => bytes *= 2,
            }
        }
    }

    fn first_bytes(&self, bytes: usize) -> String {
        let mut text = self.text.repeat(bytes / self.text.len());
        let mut end = bytes % self.text.len();
        while !self.text.is_char_boundary(end) {
            end += 1;
        }
        text.push_str(&self.text[..end]);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn haystack_has_no_needle() {
        let text = haystack().unwrap();
        assert!(text.len() > 1_000_000);
        for trace in ["pass key is", "special magic number", "quiz you about"] {
            assert!(!text.contains(trace), "{trace}");
        }
    }

    #[test]
    fn scoring_follows_the_models_card() {
        assert!(answers_exactly(" 1234567. The", "1234567"));
        assert!(answers_exactly("1234567", "1234567"));
        assert!(!answers_exactly(" 12345678.", "1234567"));
        assert!(!answers_exactly("It is 1234567.", "1234567"));
        assert!(answers("It is 1234567.", "1234567"));
    }

    #[test]
    fn needle_splits_no_word() {
        let text = "One sentence. Another one\nand a line";
        for at in 0..=text.len() {
            let place = sentence_end_near(text, at);
            assert!([0, 13, 26, text.len()].contains(&place), "{at} -> {place}");
        }
    }
}
