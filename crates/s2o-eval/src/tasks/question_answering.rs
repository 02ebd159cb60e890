//! RULER's question answering over many documents, which state facts about invented people and towns.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use super::fitting::{Draft, fit};
use super::haystack::{depths, place_among};
use super::vocabulary::{Names, word_of};
use super::{Item, ItemSpec};
use crate::error::Result;
use crate::score::Scorer;

const GIVEN_NAMES: &[&str] = &[
    "Ada", "Anton", "Clara", "Dora", "Edgar", "Elena", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Leon",
    "Mira", "Nora", "Oskar", "Paula", "Robin", "Selma", "Theo", "Ursula", "Victor", "Wanda", "Yusuf",
];
const TRADES: &str = "baker bookbinder botanist carpenter clockmaker geologist gardener painter pilot potter surveyor \
                      teacher translator weaver";
const GOODS: &str = "barley bells bricks cheese glass ink leather paper rope wool";

/// The facts of one item. No two people, towns or rivers share a name.
#[derive(Debug, Clone, Copy)]
struct Facts(Names);

impl Facts {
    fn town(self, index: usize) -> String {
        self.0.get(3 * index + 1)
    }

    fn river(self, index: usize) -> String {
        self.0.get(3 * index + 2)
    }

    fn person(self, index: usize) -> String {
        // The given name depends only on the index, so that the question can name a person without the document.
        format!("{} {}", GIVEN_NAMES[index % GIVEN_NAMES.len()], self.0.get(3 * index))
    }

    /// The document of person `index` and their place of birth.
    fn biography(self, index: usize, random: &mut ChaCha8Rng) -> String {
        let (person, town) = (self.person(index), self.town(index));
        let trade = word_of(TRADES, random);
        let year = random.random_range(1700..1950);
        format!("{person}\n{person} was born in the town of {town} in {year} and became a {trade} there.")
    }

    /// The document of town `index` and its river.
    fn gazetteer(self, index: usize, random: &mut ChaCha8Rng) -> String {
        let (town, river) = (self.town(index), self.river(index));
        let goods = word_of(GOODS, random);
        format!("{town}\nThe town of {town} lies on the river {river} and is known for its {goods}.")
    }
}

/// The town in which a person was born, which one document states.
pub(super) fn one_hop(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let facts = Facts(Names::new(&mut random));
    let depth = depths(&mut random, 1, spec.depth)[0];
    let draft = fit(name, tokenizer, spec.num_tokens, |others| {
        let mut random = random.clone();
        let told = facts.biography(0, &mut random);
        let mut documents: Vec<String> = (1..=others).map(|i| facts.biography(i, &mut random)).collect();
        documents.insert(place_among(others, depth), told);
        draft(&documents, &format!("In which town was {} born?", facts.person(0)), facts.town(0))
    })?;
    Ok(Item::generated(name, spec, draft, 32, Scorer::StringMatchPart).at_depth(depth))
}

/// The river of the town in which a person was born: one document names the town, another one its river.
pub(super) fn two_hops(name: &'static str, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
    let mut random = spec.random();
    let facts = Facts(Names::new(&mut random));
    let draft = fit(name, tokenizer, spec.num_tokens, |others| {
        let mut random = random.clone();
        let document = |i: usize, random: &mut ChaCha8Rng| match i % 2 {
            0 => facts.biography(i / 2, random),
            _ => facts.gazetteer(i / 2, random),
        };
        let mut documents: Vec<String> = (0..others + 2).map(|i| document(i, &mut random)).collect();
        documents.shuffle(&mut random);
        let question = format!("On which river lies the town where {} was born?", facts.person(0));
        draft(&documents, &question, facts.river(0))
    })?;
    Ok(Item::generated(name, spec, draft, 32, Scorer::StringMatchPart))
}

fn draft(documents: &[String], question: &str, answer: String) -> Draft {
    let documents: Vec<String> =
        documents.iter().enumerate().map(|(i, document)| format!("Document {}:\n{document}", i + 1)).collect();
    let instruction =
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.";
    Draft {
        prompt: format!(
            "{instruction}\n\nThe following are given documents.\n\n{}\n\n{instruction}\n\nQuestion: {question}",
            documents.join("\n\n")
        ),
        answer_prefix: " Answer:".to_owned(),
        references: vec![answer],
    }
}

#[cfg(test)]
mod tests {
    use crate::tasks::generated;

    fn after<'a>(text: &'a str, marker: &str) -> &'a str {
        text.split_once(marker).unwrap_or_else(|| panic!("no {marker:?}")).1.split([' ', '.']).next().unwrap()
    }

    #[test]
    fn one_document_answers_the_first_kind() {
        let item = generated("qa_1", 2048, 3);
        let (_, question) = item.prompt.rsplit_once("Question: In which town was ").unwrap();
        let person = question.strip_suffix(" born?").unwrap();
        assert_eq!(after(&item.prompt, &format!("{person} was born in the town of ")), item.references[0]);
        assert_eq!(item.prompt.matches(&item.references[0]).count(), 1);
        assert!(item.prompt.matches("Document ").count() > 20);
    }

    #[test]
    fn two_documents_answer_the_second_kind() {
        for seed in 0..4 {
            let item = generated("qa_2", 2048, seed);
            let (_, question) = item.prompt.rsplit_once("town where ").unwrap();
            let person = question.strip_suffix(" was born?").unwrap();
            let town = after(&item.prompt, &format!("{person} was born in the town of "));
            let river = after(&item.prompt, &format!("The town of {town} lies on the river "));
            assert_eq!(river, item.references[0]);
            let hop = item.prompt.split("\n\n").find(|document| document.contains(river)).unwrap();
            assert!(!hop.contains(person), "one document would be enough");
        }
    }
}
