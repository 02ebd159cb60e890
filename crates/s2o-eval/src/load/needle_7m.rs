//! The recorded prompts of needle-7m, the predecessor of the embedded model.

use s2o_models::passkey::{self, PasskeyRecord};

use crate::error::Result;
use crate::score::Scorer;
use crate::tasks::Item;
use crate::tasks::passkey::split_at_question;

/// The task's name.
pub const NEEDLE_7M: &str = "needle-7m";

/// As in the model card: seven digits, with room for the text around them.
const MAX_NEW_TOKENS: usize = 12;

/// The 30 items of `models/passkey.jsonl`: 20 of 4096 tokens and 10 of 32768, grouped by kind.
///
/// # Errors
/// As [`passkey::records`].
pub fn needle_7m() -> Result<Vec<Item>> {
    Ok((0..).zip(passkey::records()?).map(item).collect())
}

fn item((index, record): (u64, PasskeyRecord)) -> Item {
    let PasskeyRecord { input, answer, kind, tokens, depth } = record;
    let (prompt, answer_prefix) = split_at_question(input);
    Item {
        id: format!("{NEEDLE_7M}-{index}"),
        task: NEEDLE_7M.to_owned(),
        index,
        prompt,
        answer_prefix,
        references: vec![answer],
        depth: Some(depth),
        groups: vec![kind],
        ..Item::read(MAX_NEW_TOKENS, Scorer::FirstSentence, tokens.next_multiple_of(1024))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{ChatTemplate, tokenizer_for_tests};

    #[test]
    fn prompts_are_those_of_the_file() {
        let items = needle_7m().unwrap();
        for length in [4096, 32768] {
            let expected = if length == 4096 { 20 } else { 10 };
            assert_eq!(items.iter().filter(|item| item.context_tokens == length).count(), expected);
        }
        for (item, record) in items.iter().zip(passkey::records().unwrap()).take(3) {
            assert_eq!(ChatTemplate::None.apply(item), record.input);
            assert_eq!(ChatTemplate::None.encode(tokenizer_for_tests(), item).unwrap().len(), record.tokens);
            assert!(item.answer_prefix.starts_with(" The "), "{}", item.answer_prefix);
            assert_eq!((item.score(&format!(" {}.", record.answer)), item.score(" 1.")), (1.0, 0.0));
        }
    }
}
