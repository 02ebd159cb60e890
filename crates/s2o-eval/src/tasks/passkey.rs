//! Prompts in needle-7m's own words, made by [`s2o_models::passkey`], scored as InfiniteBench scores pass keys and numbers:
//! a method that finds the digits and words the sentence otherwise has found them.

use rand::RngExt;
use s2o_models::ModelError;
use s2o_models::passkey::{PasskeyPrompt, build, build_keyed};
use tokenizers::Tokenizer;

use super::fitting::Draft;
use super::haystack::depths;
use super::{Item, ItemSpec};
use crate::error::{EvalError, Result};
use crate::score::Scorer;

/// Seven digits and a few words around them, with room for tokenizers that cut otherwise.
const MAX_NEW_TOKENS: usize = 24;

/// # Errors
/// As [`super::Task::generate`].
pub(super) fn unkeyed(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let depth = depths(&mut random, 1, spec.depth)[0];
    let prompt = build(tokenizer, spec.num_tokens, depth, random.random());
    Ok(item(name, spec, prompt)?.at_depth(depth))
}

/// # Errors
/// As [`super::Task::generate`].
pub(super) fn keyed<const KEYS: usize>(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    item(name, spec, build_keyed(tokenizer, spec.num_tokens, KEYS, spec.random().random()))
}

fn item(name: &'static str, spec: &ItemSpec, prompt: Result<PasskeyPrompt, ModelError>) -> Result<Item> {
    let PasskeyPrompt { mut text, answer, .. } = prompt.map_err(|error| match error {
        ModelError::PromptTooShort { expected, got } => {
            EvalError::ContextTooShort { task: name.to_owned(), expected, got }
        }
        other => EvalError::Model(other),
    })?;
    // The question is followed by the beginning of its answer.
    let answer_prefix = text.split_off(text.rfind('?').map_or(text.len(), |mark| mark + 1));
    let draft = Draft { prompt: text, answer_prefix, references: vec![answer] };
    Ok(Item::generated(name, spec, draft, MAX_NEW_TOKENS, Scorer::FirstInteger))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{find, tokenizer_for_tests};

    fn generate(task: &str) -> Item {
        find(task).unwrap().generate(tokenizer_for_tests(), &ItemSpec::new(2048, 2)).unwrap()
    }

    #[test]
    fn words_are_the_demo_models() {
        let item = generate("passkey");
        assert!(item.prompt.ends_with("\n\nWhat is the pass key?"));
        assert_eq!(item.answer_prefix, " The pass key is");
        let number = &item.references[0];
        assert!(item.prompt.contains(&format!("\nThe pass key is {number}. Remember it. {number} is the pass key.\n")));
    }

    #[test]
    fn keyed_prompts_hide_as_many_as_they_say() {
        for (task, keys) in [("keyed_1", 1), ("keyed_4", 4), ("keyed_16", 16)] {
            let item = generate(task);
            assert_eq!(item.prompt.matches("\nThe special magic number for ").count(), keys, "{task}");
            let key = item.answer_prefix.strip_prefix(" The special magic number for ").unwrap();
            let key = key.strip_suffix(" is:").unwrap();
            assert!(item.prompt.contains(&format!("The special magic number for {key} is: {}.", item.references[0])));
        }
    }
}
