//! Long-context tasks made from a seed and fitted to a number of tokens.
//!
//! ```
//! use s2o_eval::tasks::{self, ItemSpec};
//!
//! # fn run(tokenizer: &tokenizers::Tokenizer) -> s2o_eval::Result<()> {
//! let task = tasks::find("niah_single_2")?;
//! let item = task.generate(tokenizer, &ItemSpec::new(4096, 0).depth(0.5))?;
//! assert_eq!(item.score(&item.references[0]), 1.0);
//! # Ok(())
//! # }
//! ```
//!
//! RULER's tasks (Apache-2.0) use the wording of its prompts, its answer prefixes, token budgets and scorers, so that
//! results can be compared with published ones. The texts that RULER downloads are made here instead: the essay is the
//! text of [`s2o_models::passkey::haystack`], and the documents of `qa_1` and `qa_2` are facts about invented people.
//!
//! The embedded model, needle-11m, was trained on these kinds of tasks, with other texts, words and numbers. It can
//! answer all of them except `qa_1` and `qa_2`, which need a larger model.

mod chat_template;
mod fitting;
mod haystack;
mod item;
mod magic_numbers;
pub mod passkey;
mod question_answering;
mod retrieval;
mod variable_tracking;
mod vocabulary;
mod word_extraction;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tokenizers::Tokenizer;

pub use chat_template::ChatTemplate;
pub use item::Item;

use crate::error::{EvalError, Result};
use magic_numbers::{Filling, Key, Needles, Value};

/// A generated prompt is at most this many tokens shorter than requested.
pub const SLACK: usize = 128;

/// Length of the longest supported prompt, in tokens. Names and words are distinct up to this length.
pub const MAX_TOKENS: usize = 1 << 22;

/// Parameters of one item of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ItemSpec {
    /// Maximum number of tokens of prompt and answer prefix together, special tokens of the tokenizer included. A chat
    /// template and the answer need additional tokens.
    pub num_tokens: usize,
    /// Depth of the requested fact: 0 at the context's start, 1 at its end. `None` lets the seed choose.
    pub depth: Option<f64>,
    /// Distinguishes items of the same length, depth and seed.
    pub index: u64,
    /// Words, numbers and places depend only on seed and index.
    pub seed: u64,
}

impl ItemSpec {
    /// Item 0 of a length, at a depth that the seed chooses.
    pub fn new(num_tokens: usize, seed: u64) -> Self {
        Self { num_tokens, depth: None, index: 0, seed }
    }

    /// Sets the depth.
    pub fn depth(self, depth: f64) -> Self {
        Self { depth: Some(depth), ..self }
    }

    /// Selects another item of the same length, depth and seed.
    pub fn index(self, index: u64) -> Self {
        Self { index, ..self }
    }

    fn id(&self, task: &str) -> String {
        let depth = self.depth.map(|depth| format!("-d{depth}")).unwrap_or_default();
        format!("{task}-{}{depth}-i{}-s{}", self.num_tokens, self.index, self.seed)
    }

    fn random(&self) -> ChaCha8Rng {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(self.index);
        random
    }
}

/// Makes one item of the task with the given name.
type Generator = fn(&'static str, &Tokenizer, &ItemSpec) -> Result<Item>;

/// A task: its name and the generator of its items.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    /// The name on the command line.
    pub name: &'static str,
    /// A description on one line.
    pub summary: &'static str,
    /// Whether the answer is at one place, so that [`ItemSpec::depth`] may choose it.
    pub takes_depth: bool,
    generator: Generator,
}

impl Task {
    /// The id of the item of `spec`, without making the item.
    pub fn item_id(&self, spec: &ItemSpec) -> String {
        spec.id(self.name)
    }

    /// The item of `spec`: the same for the same arguments on every machine. Prompt and answer prefix have at most
    /// `spec.num_tokens` tokens, and at most [`SLACK`] tokens less.
    ///
    /// # Errors
    /// [`EvalError::ContextTooShort`] if question and needles alone are longer; [`EvalError::WrongInput`] for a depth
    /// outside `0..=1`, a depth that the task does not take, or more than [`MAX_TOKENS`]; [`EvalError::Tokenizer`].
    pub fn generate(&self, tokenizer: &Tokenizer, spec: &ItemSpec) -> Result<Item> {
        if let Some(depth) = spec.depth {
            if !self.takes_depth {
                let what = "depth of a task whose answer has no one place";
                return Err(EvalError::wrong(what, "none", format!("{depth} for {}", self.name)));
            }
            if !(0.0..=1.0).contains(&depth) {
                return Err(EvalError::wrong("depth", "a number from 0 to 1", depth));
            }
        }
        if spec.num_tokens > MAX_TOKENS {
            return Err(EvalError::wrong("tokens of a prompt", format!("at most {MAX_TOKENS}"), spec.num_tokens));
        }
        (self.generator)(self.name, tokenizer, spec)
    }
}

const fn at_depth(name: &'static str, summary: &'static str, generator: Generator) -> Task {
    Task { name, summary, takes_depth: true, generator }
}

const fn spread(name: &'static str, summary: &'static str, generator: Generator) -> Task {
    Task { name, summary, takes_depth: false, generator }
}

/// One needle with a number in an essay. RULER's other needle tasks are variants of it.
const ONE_NUMBER: Needles =
    Needles { filling: Filling::Essay, key: Key::Word, value: Value::Number, keys: 1, values: 1, asked: 1 };

/// Every task: a needle in a haystack by depth and length, RULER's thirteen, two kinds from needle-11m's training, and
/// InfiniteBench's two retrievals.
pub static ALL: &[Task] = &[
    at_depth("niah", "the number of a city, hidden in an essay", magic_numbers::of_city),
    at_depth("niah_single_1", "RULER: the number of a word, hidden in repeated sentences", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { filling: Filling::Noise, ..ONE_NUMBER }, tokenizer, spec)
    }),
    at_depth("niah_single_2", "RULER: the number of a word, hidden in an essay", |name, tokenizer, spec| {
        magic_numbers::of_words(name, ONE_NUMBER, tokenizer, spec)
    }),
    at_depth("niah_single_3", "RULER: the UUID of a word, hidden in an essay", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { value: Value::Uuid, ..ONE_NUMBER }, tokenizer, spec)
    }),
    at_depth("niah_multikey_1", "RULER: the number of one of four words in an essay", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { keys: 4, ..ONE_NUMBER }, tokenizer, spec)
    }),
    at_depth("niah_multikey_2", "RULER: the number of a word among lines of that form", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { filling: Filling::Needles, ..ONE_NUMBER }, tokenizer, spec)
    }),
    at_depth("niah_multikey_3", "RULER: the UUID of a UUID among lines of that form", |name, tokenizer, spec| {
        let uuids = Needles { filling: Filling::Needles, key: Key::Uuid, value: Value::Uuid, ..ONE_NUMBER };
        magic_numbers::of_words(name, uuids, tokenizer, spec)
    }),
    spread("niah_multivalue", "RULER: all four numbers of a word in an essay", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { values: 4, ..ONE_NUMBER }, tokenizer, spec)
    }),
    spread("niah_multiquery", "RULER: the numbers of four words in an essay", |name, tokenizer, spec| {
        magic_numbers::of_words(name, Needles { keys: 4, asked: 4, ..ONE_NUMBER }, tokenizer, spec)
    }),
    spread("vt", "RULER: all variables of a chain of assignments", variable_tracking::generate),
    spread("cwe", "RULER: the ten most common words of a list", word_extraction::common_words),
    spread("fwe", "RULER: the three most frequent coded words", word_extraction::frequent_words),
    at_depth("qa_1", "RULER: a fact that one of many documents states", question_answering::one_hop),
    spread("qa_2", "RULER: a fact that follows from two of many documents", question_answering::two_hops),
    at_depth("passkey", "the pass key, hidden in an essay, in needle-11m's words", passkey::unkeyed),
    spread("keyed_1", "the number of a word in an essay, in needle-11m's words", passkey::keyed::<1>),
    spread("keyed_4", "the number of one of 4 words in an essay, in needle-11m's words", passkey::keyed::<4>),
    spread("keyed_16", "the number of one of 16 words in an essay, in needle-11m's words", passkey::keyed::<16>),
    spread("keyed_64", "the number of one of 64 words in an essay, in needle-11m's words", passkey::keyed::<64>),
    at_depth("number_retrieval", "InfiniteBench: ten digits, hidden in repeated sentences", retrieval::number),
    at_depth("kv_retrieval", "InfiniteBench: the value of a key in a JSON object", retrieval::key_value),
];

/// Names of RULER's thirteen tasks, whose mean RULER reports.
pub fn ruler() -> impl Iterator<Item = &'static str> {
    ALL.iter().filter(|task| task.summary.starts_with("RULER: ")).map(|task| task.name)
}

/// Whether a task is one of RULER's, generated or read from RULER's own files.
pub fn is_ruler(name: &str) -> bool {
    name.starts_with("ruler/") || ruler().any(|task| task == name)
}

/// The task of this name.
///
/// # Errors
/// [`EvalError::Unknown`] with the existing names.
pub fn find(name: &str) -> Result<&'static Task> {
    let task = ALL.iter().find(|task| task.name == name);
    task.ok_or_else(|| EvalError::unknown("task", ALL.iter().map(|task| task.name), name))
}

#[cfg(test)]
pub(crate) fn tokenizer_for_tests() -> &'static Tokenizer {
    use std::sync::LazyLock;
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        Tokenizer::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/needle-11m/tokenizer.json")).unwrap()
    });
    &TOKENIZER
}

/// An item of a task.
#[cfg(test)]
pub(crate) fn generated(task: &str, num_tokens: usize, seed: u64) -> Item {
    find(task).unwrap().generate(tokenizer_for_tests(), &ItemSpec::new(num_tokens, seed)).unwrap()
}

#[cfg(test)]
mod tests;
