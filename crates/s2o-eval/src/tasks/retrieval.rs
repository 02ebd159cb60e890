//! InfiniteBench's number retrieval and key-value retrieval.

use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use super::fitting::{Draft, fit};
use super::haystack::{depths, hide, noise, place_among};
use super::vocabulary::{number as digits, uuid};
use super::{Item, ItemSpec};
use crate::error::Result;
use crate::score::Scorer;

/// Ten digits in repeated sentences. The first integer of the answer must equal them.
pub(super) fn number(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let digits = digits(&mut random, 10);
    let depth = depths(&mut random, 1, spec.depth)[0];
    let needle = format!("The sequence of digits is {digits}. Remember it. {digits} is the sequence of digits.");
    let draft = fit(name, tokenizer, spec.num_tokens, |lines| {
        let context = hide(&noise(lines), [(depth, needle.as_str())]);
        Draft {
            prompt: format!(
                "There is important information hidden inside a lot of irrelevant text. Find it and memorize it. \
                 I will quiz you about it.\n{context}\n\nWhat is the sequence of digits?"
            ),
            answer_prefix: " The sequence of digits is".to_owned(),
            references: vec![digits.clone()],
        }
    })?;
    Ok(Item::generated(name, spec, draft, 12, Scorer::FirstInteger).at_depth(depth))
}

/// A JSON object of UUIDs. The value of one key must be a word of the answer.
pub(super) fn key_value(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let (key, value) = (uuid(&mut random), uuid(&mut random));
    let depth = depths(&mut random, 1, spec.depth)[0];
    let entry = |key: &str, value: &str| format!("\"{key}\": \"{value}\"");
    let other = |random: &mut ChaCha8Rng| entry(&uuid(random), &uuid(random));
    let draft = fit(name, tokenizer, spec.num_tokens, |others| {
        let mut random = random.clone();
        let mut entries: Vec<String> = (0..others).map(|_| other(&mut random)).collect();
        entries.insert(place_among(others, depth), entry(&key, &value));
        Draft {
            prompt: format!(
                "Find the value of one key in the JSON object below.\n\nJSON object:\n{{{}}}\n\nKey: \"{key}\"",
                entries.join(", ")
            ),
            answer_prefix: "\nThe value of this key is:".to_owned(),
            references: vec![value.clone()],
        }
    })?;
    Ok(Item::generated(name, spec, draft, 50, Scorer::KeyValue).at_depth(depth))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::tasks::generated;

    #[test]
    fn the_object_is_json_and_holds_the_answer() {
        let item = generated("kv_retrieval", 3000, 1);
        let (_, rest) = item.prompt.split_once("JSON object:\n").unwrap();
        let (object, question) = rest.split_once("\n\nKey: ").unwrap();
        let object: BTreeMap<String, String> = serde_json::from_str(object).unwrap();
        assert!(object.len() > 10, "{}", object.len());
        assert_eq!(object[question.trim_matches('"')], item.references[0]);
    }

    #[test]
    fn a_longer_number_is_wrong() {
        let item = generated("number_retrieval", 1024, 1);
        assert_eq!(item.references[0].len(), 10);
        assert_eq!(item.score(&format!(" {}1.", item.references[0])), 0.0);
    }
}
