//! Special magic numbers in a haystack: the needle task by depth and length, and RULER's eight needle tasks.

use rand_chacha::ChaCha8Rng;
// One of the prefaces that needle-11m was trained with, and RULER's own.
use s2o_models::passkey::HEADER;
use tokenizers::Tokenizer;

use super::fitting::{Draft, fit};
use super::haystack::{Essay, depths, hide, noise, place_among};
use super::vocabulary::{Words, distinct, number, uuid, word_of};
use super::{Item, ItemSpec};
use crate::error::Result;
use crate::score::Scorer;

const CITIES: &str = "Amsterdam Athens Bogota Cairo Dakar Dublin Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos \
                      Lima Lisbon Manila Montreal Nairobi Oslo Prague Quito Riga Seoul Sydney Tunis Vienna Warsaw \
                      Zurich";

/// One number of one city in an essay. The answer may contain it anywhere.
pub(super) fn of_city(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let city = word_of(CITIES, &mut random);
    let number = number(&mut random, 7);
    let depth = depths(&mut random, 1, spec.depth)[0];
    let essay = Essay::from_somewhere(&mut random)?;
    let needle = format!("The special magic {city} number is: {number}");
    let draft = fit(name, tokenizer, spec.num_tokens, |bytes| {
        let context = hide(&essay.first_bytes(bytes), [(depth, needle.as_str())]);
        Draft {
            prompt: format!("{HEADER}{context}\n\nWhat is the special magic {city} number?"),
            answer_prefix: format!(" The special magic {city} number is:"),
            references: vec![number.clone()],
        }
    })?;
    Ok(Item::generated(name, spec, draft, 32, Scorer::Substring).at_depth(depth))
}

/// The parameters of RULER's needle tasks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needles {
    pub(super) filling: Filling,
    pub(super) key: Key,
    pub(super) value: Value,
    /// Number of hidden keys, in addition to those of the filling.
    pub(super) keys: usize,
    /// Number of values per key.
    pub(super) values: usize,
    /// Number of keys in the question, from the first on.
    pub(super) asked: usize,
}

/// The text around the needles.
#[derive(Debug, Clone, Copy)]
pub(super) enum Filling {
    /// English text.
    Essay,
    /// A few sentences, repeated.
    Noise,
    /// Other needles.
    Needles,
}

/// The form of a key.
#[derive(Debug, Clone, Copy)]
pub(super) enum Key {
    Word,
    Uuid,
}

impl Key {
    fn draw(self, words: &Words, index: usize, random: &mut ChaCha8Rng) -> String {
        match self {
            Self::Word => words.get(index),
            Self::Uuid => uuid(random),
        }
    }
}

/// The form of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    Number,
    Uuid,
}

impl Value {
    fn draw(self, random: &mut ChaCha8Rng) -> String {
        match self {
            Self::Number => number(random, 7),
            Self::Uuid => uuid(random),
        }
    }
}

/// A RULER needle task in RULER's words.
pub(super) fn of_words(name: &'static str, needles: Needles, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let words = Words::shuffled(&mut random)?;
    let kind = match needles.value {
        Value::Number => "number",
        Value::Uuid => "uuid",
    };
    let line = |key: &str, value: &str| format!("One of the special magic {kind}s for {key} is: {value}.");

    let keys: Vec<String> = (0..needles.keys).map(|i| needles.key.draw(&words, i, &mut random)).collect();
    let count = needles.keys * needles.values;
    let values = distinct(count, || needles.value.draw(&mut random));
    let lines: Vec<String> =
        values.iter().enumerate().map(|(i, value)| line(&keys[i / needles.values], value)).collect();
    let depths = depths(&mut random, count, spec.depth);
    let essay = Essay::from_somewhere(&mut random)?;
    let place = || depths.iter().copied().zip(lines.iter().map(String::as_str));

    let references = values[..needles.asked * needles.values].to_vec();
    let (question, answer_prefix) = question(kind, &keys[..needles.asked], references.len() == 1);
    let header = HEADER.replace("numbers", &format!("{kind}s"));
    let draft = fit(name, tokenizer, spec.num_tokens, |amount| {
        let context = match needles.filling {
            Filling::Essay => hide(&essay.first_bytes(amount), place()),
            Filling::Noise => hide(&noise(amount), place()),
            Filling::Needles => {
                let mut random = random.clone();
                let mut other = |i: usize| {
                    let key = needles.key.draw(&words, needles.keys + i, &mut random);
                    line(&key, &needles.value.draw(&mut random))
                };
                let mut context: Vec<String> = (0..amount).map(&mut other).collect();
                for (depth, line) in place() {
                    context.insert(place_among(amount, depth), line.to_owned());
                }
                context.join("\n")
            }
        };
        Draft {
            prompt: format!("{header}{context}\n\n{question}"),
            answer_prefix: answer_prefix.clone(),
            references: references.clone(),
        }
    })?;
    let item = Item::generated(name, spec, draft, 128, Scorer::StringMatchAll);
    // Several requested values have no single depth.
    Ok(if item.references.len() == 1 { item.at_depth(depths[0]) } else { item })
}

fn question(kind: &str, keys: &[String], is_single: bool) -> (String, String) {
    let keys = match keys {
        [key] => key.clone(),
        [before @ .., last] => format!("{}, and {last}", before.join(", ")),
        [] => String::new(),
    };
    if is_single {
        let subject = format!("special magic {kind} for {keys} mentioned in the provided text");
        (format!("What is the {subject}?"), format!(" The {subject} is:"))
    } else {
        let subject = format!("special magic {kind}s for {keys} mentioned in the provided text");
        (format!("What are all the {subject}?"), format!(" The {subject} are"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::generated;

    fn item(task: &str) -> Item {
        generated(task, 2048, 11)
    }

    #[test]
    fn one_value_is_asked_for_in_the_demo_models_words() {
        let item = item("niah_multikey_1");
        let (_, question) = item.prompt.rsplit_once("\n\n").unwrap();
        let key = question.strip_prefix("What is the special magic number for ").unwrap();
        let key = key.strip_suffix(" mentioned in the provided text?").unwrap();
        let prefix = format!(" The special magic number for {key} mentioned in the provided text is:");
        assert_eq!(item.answer_prefix, prefix);
        let needle = format!("\nOne of the special magic numbers for {key} is: {}.\n", item.references[0]);
        assert_eq!(item.prompt.matches(&needle).count(), 1);
    }

    #[test]
    fn counts_follow_ruler() {
        for (task, needles, asked) in
            [("niah_single_1", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4), ("niah_multiquery", 4, 4)]
        {
            let item = item(task);
            assert_eq!(item.prompt.matches("\nOne of the special magic numbers for ").count(), needles, "{task}");
            assert_eq!(item.references.len(), asked, "{task}");
        }
    }

    #[test]
    fn several_keys_are_all_named() {
        let item = item("niah_multiquery");
        let (_, question) = item.prompt.rsplit_once("\n\n").unwrap();
        assert!(question.starts_with("What are all the special magic numbers for ") && question.contains(", and "));
        for value in &item.references {
            let before = item.prompt.split(&format!(" is: {value}.")).next().unwrap();
            let key = before.rsplit(' ').next().unwrap();
            assert!(question.contains(key), "{key}");
        }
    }

    #[test]
    fn a_part_of_the_values_gives_a_part_of_the_score() {
        let item = item("niah_multivalue");
        assert_eq!(item.score(&format!(" {} and {}", item.references[0], item.references[2])), 0.5);
    }

    #[test]
    fn lines_of_the_same_form_fill_the_third_kind_of_haystack() {
        let item = item("niah_multikey_3");
        let lines = item.prompt.lines().filter(|line| line.starts_with("One of the special magic uuids for "));
        assert!(lines.count() > 10);
    }
}
