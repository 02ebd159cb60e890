//! RULER's variable tracking: a chain of assignments in repeated sentences, after one worked example.

use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use super::fitting::{Draft, fit};
use super::haystack::{depths, hide, noise};
use super::vocabulary::{distinct, letters, number};
use super::{Item, ItemSpec};
use crate::error::Result;
use crate::score::Scorer;

/// The first variable gets the value. Each of the other four gets it from the variable before.
const NUM_VARIABLES: usize = 5;

/// Lines of noise in the worked example.
const EXAMPLE_LINES: usize = 5;

/// A chain of assignments and the depths of its lines.
struct Chain {
    names: Vec<String>,
    value: String,
    depths: Vec<f64>,
}

impl Chain {
    fn draw(names: &[String], random: &mut ChaCha8Rng) -> Self {
        let mut depths = depths(random, names.len(), None);
        // A variable is assigned before it is read.
        depths.sort_by(f64::total_cmp);
        Self { names: names.to_vec(), value: number(random, 5), depths }
    }

    fn lines(&self) -> Vec<String> {
        let sources = std::iter::once(self.value.clone()).chain(self.names.iter().map(|name| format!("VAR {name}")));
        self.names.iter().zip(sources).map(|(name, source)| format!("VAR {name} = {source}.")).collect()
    }

    fn prompt(&self, num_lines: usize) -> String {
        let lines = self.lines();
        let context = hide(&noise(num_lines), self.depths.iter().copied().zip(lines.iter().map(String::as_str)));
        format!(
            "Memorize and track the chain of variable assignment hidden in the following text.\n\n{context}\n\
             Question: Find all variables that are assigned the value {} in the text above.",
            self.value
        )
    }

    fn answer_prefix(&self) -> String {
        format!(
            " Answer: According to the chain of variable assignment in the text above, {NUM_VARIABLES} variables are \
             assigned the value {}, they are:",
            self.value
        )
    }
}

pub(super) fn generate(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let alphabet: Vec<u8> = (b'A'..=b'Z').collect();
    let names = distinct(2 * NUM_VARIABLES, || letters(&mut random, &alphabet, 5));
    let (example, asked) = names.split_at(NUM_VARIABLES);
    let (example, asked) = (Chain::draw(example, &mut random), Chain::draw(asked, &mut random));
    let example = format!("{}{} {}", example.prompt(EXAMPLE_LINES), example.answer_prefix(), example.names.join(" "));
    let draft = fit(name, tokenizer, spec.num_tokens, |lines| Draft {
        prompt: format!("{example}\n\n{}", asked.prompt(lines)),
        answer_prefix: asked.answer_prefix(),
        references: asked.names.clone(),
    })?;
    Ok(Item::generated(name, spec, draft, 30, Scorer::StringMatchAll))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::generated;

    #[test]
    fn following_the_chain_gives_the_references() {
        for seed in 0..8 {
            let item = generated("vt", 2048, seed);
            let (_, asked) = item.prompt.rsplit_once("Memorize and track").unwrap();
            let value = item.answer_prefix.split("value ").nth(1).unwrap().split(',').next().unwrap();
            let mut found: Vec<&str> = Vec::new();
            for line in asked.lines().filter_map(|line| line.strip_prefix("VAR ")) {
                let (name, source) = line.strip_suffix('.').unwrap().split_once(" = ").unwrap();
                let known = source == value || source.strip_prefix("VAR ").is_some_and(|name| found.contains(&name));
                assert!(known, "{line} reads what was not assigned");
                found.push(name);
            }
            assert_eq!(found, item.references);
        }
    }

    #[test]
    fn the_example_comes_first_and_is_answered() {
        let item = generated("vt", 2048, 0);
        let (example, _) = item.prompt.split_once("\n\nMemorize").unwrap();
        let (_, answer) = example.rsplit_once("they are: ").unwrap();
        assert_eq!(answer.split(' ').count(), NUM_VARIABLES);
        assert_eq!(item.score(answer), 0.0);
    }
}
