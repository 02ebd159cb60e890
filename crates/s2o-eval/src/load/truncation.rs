//! Middle truncation: question and instruction are at the ends of a prompt, so the middle is cut.

use tokenizers::Tokenizer;

use crate::error::{EvalError, Result};

/// `text` if it has at most `max_tokens` tokens, special tokens included. Otherwise its two ends, half the tokens each.
///
/// The text is cut between characters, and tokens at the cut may merge, so the result may have a few tokens less than
/// `max_tokens`, but never more.
///
/// # Errors
/// [`EvalError::Tokenizer`].
pub fn truncate_middle(tokenizer: &Tokenizer, text: &str, max_tokens: usize) -> Result<String> {
    let count = |text: &str| Ok::<_, EvalError>(tokenizer.encode(text, true).map_err(EvalError::tokenizer)?.len());
    let encoding = tokenizer.encode(text, false).map_err(EvalError::tokenizer)?;
    let special = count(text)?.saturating_sub(encoding.len());
    let mut keep = max_tokens.saturating_sub(special);
    if encoding.len() <= keep {
        return Ok(text.to_owned());
    }
    let offsets = encoding.get_offsets();
    while keep > 0 {
        let (first, last) = (keep - keep / 2, keep / 2);
        let head = boundary_before(text, offsets[first - 1].1);
        let tail =
            offsets.get(offsets.len() - last).map_or(text.len(), |&(start, _)| boundary_after(text, start)).max(head);
        let cut = [&text[..head], &text[tail..]].concat();
        let tokens = count(&cut)?;
        if tokens <= max_tokens {
            return Ok(cut);
        }
        keep = keep.saturating_sub((tokens - max_tokens).max(1));
    }
    Ok(String::new())
}

// A token can end within a character's bytes.
fn boundary_before(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0)
}

fn boundary_after(text: &str, at: usize) -> usize {
    (at..text.len()).find(|&i| text.is_char_boundary(i)).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tasks::tokenizer_for_tests;

    fn count(text: &str) -> usize {
        tokenizer_for_tests().encode(text, true).unwrap().len()
    }

    #[test]
    fn both_ends_stay() {
        let text = format!("Begin here. {} End here.", "The middle goes away. ".repeat(200));
        let cut = truncate_middle(tokenizer_for_tests(), &text, 50).unwrap();
        assert!(cut.starts_with("Begin here. ") && cut.ends_with(" End here."), "{cut}");
        assert!((45..=50).contains(&count(&cut)), "{}", count(&cut));
    }

    #[test]
    fn what_fits_stays_whole() {
        let text = "Short enough.";
        assert_eq!(truncate_middle(tokenizer_for_tests(), text, count(text)).unwrap(), text);
        assert_ne!(truncate_middle(tokenizer_for_tests(), text, count(text) - 1).unwrap(), text);
        assert_eq!(truncate_middle(tokenizer_for_tests(), text, 0).unwrap(), "");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn never_longer_than_the_budget(text in "(word |é|中文|🦀|[0-9]{3}|\\n){0,80}", max_tokens in 0usize..60) {
            let cut = truncate_middle(tokenizer_for_tests(), &text, max_tokens).unwrap();
            prop_assert!(count(&cut) <= max_tokens.max(count("")), "{} of {}", count(&cut), max_tokens);
            prop_assert!(cut.len() <= text.len());
        }
    }
}
