//! Search for the longest prompt within a given length.

use tokenizers::Tokenizer;

use crate::error::{EvalError, Result};

/// The search ends if it is this close below the wanted length, in tokens.
const CLOSE: usize = 16;

/// Interpolation needs few rounds. After this many, the interval is halved, which always ends.
const ROUNDS_OF_INTERPOLATION: usize = 12;

/// More units than this per wanted token mean that the tokenizer makes no tokens of the text.
const MAX_UNITS_PER_TOKEN: usize = 64;

/// The parts of an item that depend on its length.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Draft {
    pub(super) prompt: String,
    pub(super) answer_prefix: String,
    pub(super) references: Vec<String>,
}

/// A prompt size: its units of filling, and its tokens.
#[derive(Clone, Copy)]
struct Size {
    units: usize,
    tokens: usize,
}

/// Calls `build` with growing amounts of filling (bytes, lines, documents: any unit whose tokens add up about linearly)
/// and returns the longest draft found with at most `wanted` tokens, special tokens and answer prefix included. It is
/// at most one unit or 16 tokens shorter than the longest possible draft.
///
/// # Errors
/// [`EvalError::ContextTooShort`] if the draft without filling is too long; [`EvalError::Tokenizer`].
pub(super) fn fit(task: &str, tokenizer: &Tokenizer, wanted: usize, build: impl Fn(usize) -> Draft) -> Result<Draft> {
    let mut best = build(0);
    let mut fits = Size { units: 0, tokens: count_tokens(tokenizer, &best)? };
    if fits.tokens > wanted {
        return Err(EvalError::ContextTooShort { task: task.to_owned(), expected: fits.tokens, got: wanted });
    }
    let empty = fits.tokens;
    let mut exceeds: Option<Size> = None;
    let mut round = 0;
    while wanted - fits.tokens > CLOSE && exceeds.is_none_or(|size| size.units - fits.units > 1) {
        let aim = wanted - CLOSE / 2 - fits.tokens;
        let units = match exceeds {
            Some(size) if round < ROUNDS_OF_INTERPOLATION => {
                let step = (size.units - fits.units) * aim / (size.tokens - fits.tokens);
                fits.units + step.clamp(1, size.units - fits.units - 1)
            }
            Some(size) => fits.units.midpoint(size.units),
            None if fits.tokens > empty => fits.units + (fits.units * aim / (fits.tokens - empty)).max(1),
            None => (2 * fits.units).max(64),
        };
        if units > wanted.saturating_mul(MAX_UNITS_PER_TOKEN).max(4096) {
            return Err(EvalError::tokenizer(format!("no filling makes a prompt of {wanted} tokens")));
        }
        let draft = build(units);
        let size = Size { units, tokens: count_tokens(tokenizer, &draft)? };
        if size.tokens > wanted {
            exceeds = Some(size);
        } else {
            (best, fits) = (draft, size);
        }
        round += 1;
    }
    Ok(best)
}

fn count_tokens(tokenizer: &Tokenizer, draft: &Draft) -> Result<usize> {
    let text = [draft.prompt.as_str(), &draft.answer_prefix].concat();
    Ok(tokenizer.encode(text, true).map_err(EvalError::tokenizer)?.len())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;
    use crate::tasks::tokenizer_for_tests;

    fn draft(units: usize, unit: &str) -> Draft {
        Draft { prompt: unit.repeat(units), answer_prefix: " end".into(), references: Vec::new() }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn never_too_long_and_at_most_a_unit_too_short(wanted in 8usize..600, words in 1usize..30) {
            let tokenizer = tokenizer_for_tests();
            let unit = "line ".repeat(words) + "\n";
            let unit_tokens = tokenizer.encode(unit.as_str(), false).unwrap().len();
            let fitted = fit("test", tokenizer, wanted, |units| draft(units, &unit)).unwrap();
            let tokens = count_tokens(tokenizer, &fitted).unwrap();
            prop_assert!(tokens <= wanted && tokens + unit_tokens.max(CLOSE) + 1 >= wanted, "{} of {}", tokens, wanted);
        }
    }

    #[test]
    fn takes_few_rounds() {
        let rounds = Cell::new(0);
        let build = |units| {
            rounds.set(rounds.get() + 1);
            draft(units, "x y ")
        };
        fit("test", tokenizer_for_tests(), 20_000, build).unwrap();
        assert!(rounds.get() <= 6, "{}", rounds.get());
    }

    #[test]
    fn says_how_long_the_shortest_is() {
        let error = fit("test", tokenizer_for_tests(), 1, |units| draft(units, "x ")).unwrap_err();
        assert!(matches!(error, EvalError::ContextTooShort { expected: 2.., got: 1, .. }), "{error}");
    }

    #[test]
    fn filling_without_tokens_ends_with_an_error() {
        let error = fit("test", tokenizer_for_tests(), 1000, |units| draft(units, "")).unwrap_err();
        assert!(matches!(error, EvalError::Tokenizer { .. }), "{error}");
    }
}
