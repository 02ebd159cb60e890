//! [`Sample`]: one prompt to run; and [`Grid`], which makes samples of tasks by length, depth and number.

use std::borrow::Cow;

use tokenizers::Tokenizer;

use super::passage::Passage;
use crate::error::{EvalError, Result};
use crate::load::{self, NEEDLE_7M};
use crate::tasks::{self, Item, ItemSpec, Task};

/// One prompt to run.
#[derive(Debug, Clone)]
pub enum Sample {
    /// An item that is made when it is run, because all prompts of a long run would not fit into memory.
    Generated {
        /// The task that makes it.
        task: &'static Task,
        /// Parameters of the item.
        spec: ItemSpec,
    },
    /// An item that was read from a file.
    Given(Item),
    /// A text whose perplexity is measured.
    Passage(Passage),
}

impl Sample {
    /// Identifies the sample. The same sample has the same id in every run.
    pub fn id(&self) -> Cow<'_, str> {
        match self {
            Self::Generated { task, spec } => task.item_id(spec).into(),
            Self::Given(item) => item.id.as_str().into(),
            Self::Passage(passage) => passage.id().into(),
        }
    }

    /// The task's name.
    pub fn task(&self) -> &str {
        match self {
            Self::Generated { task, .. } => task.name,
            Self::Given(item) => &item.task,
            Self::Passage(passage) => &passage.name,
        }
    }

    /// The requested length in tokens.
    pub fn context_tokens(&self) -> usize {
        match self {
            Self::Generated { spec, .. } => spec.num_tokens,
            Self::Given(item) => item.context_tokens,
            Self::Passage(passage) => passage.context_tokens,
        }
    }

    /// The item, generated if necessary; `None` for a passage.
    ///
    /// # Errors
    /// As [`Task::generate`].
    pub fn item(&self, tokenizer: &Tokenizer) -> Result<Option<Cow<'_, Item>>> {
        match self {
            Self::Generated { task, spec } => Ok(Some(Cow::Owned(task.generate(tokenizer, spec)?))),
            Self::Given(item) => Ok(Some(Cow::Borrowed(item))),
            Self::Passage(_) => Ok(None),
        }
    }

    /// Digest of a sample that was read from a file. A generated item follows from its id and has none.
    pub(super) fn digest(&self) -> Option<String> {
        let texts: Vec<&str> = match self {
            Self::Generated { .. } => return None,
            Self::Given(item) => {
                let references = item.references.iter().map(String::as_str);
                [item.prompt.as_str(), &item.answer_prefix].into_iter().chain(references).collect()
            }
            Self::Passage(passage) => vec![&passage.text],
        };
        // FNV-1a is the same on every machine and in every release. No text contains the byte 0xff.
        let bytes = texts.iter().flat_map(|text| text.bytes().chain([0xff]));
        let hash = bytes
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        Some(format!("{hash:016x}"))
    }
}

/// Several tasks under one name.
#[derive(Debug)]
pub struct Group {
    /// The name on the command line.
    pub name: &'static str,
    /// A description on one line.
    pub summary: &'static str,
    tasks: fn() -> Vec<&'static str>,
}

/// All groups.
pub static GROUPS: &[Group] = &[
    Group { name: "ruler", summary: "RULER's thirteen tasks", tasks: || tasks::ruler().collect() },
    Group {
        name: "keyed",
        summary: "the number of one of 1, 4, 16 and 64 words",
        tasks: || vec!["keyed_1", "keyed_4", "keyed_16", "keyed_64"],
    },
    Group { name: "all", summary: "every generated task", tasks: || tasks::ALL.iter().map(|task| task.name).collect() },
];

/// Task names with groups expanded, each name once. `needle-7m` stands for the recorded prompts ([`load::needle_7m`]).
///
/// # Errors
/// [`EvalError::Unknown`].
pub fn task_names<'n>(names: impl IntoIterator<Item = &'n str>) -> Result<Vec<&'static str>> {
    let mut chosen = Vec::new();
    for name in names {
        let more = match GROUPS.iter().find(|group| group.name == name) {
            Some(group) => (group.tasks)(),
            None if name == NEEDLE_7M => vec![NEEDLE_7M],
            None => {
                let groups = GROUPS.iter().map(|group| group.name).chain([NEEDLE_7M]);
                let known = groups.chain(tasks::ALL.iter().map(|task| task.name));
                vec![tasks::find(name).map_err(|_| EvalError::unknown("task", known, name))?.name]
            }
        };
        for name in more {
            if !chosen.contains(&name) {
                chosen.push(name);
            }
        }
    }
    Ok(chosen)
}

/// Lengths, depths and number of items to make for each task.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// Prompt lengths in tokens.
    pub lengths: Vec<usize>,
    /// Depths, for tasks whose answer is at one place. If empty, the seed chooses a depth for each item.
    pub depths: Vec<f64>,
    /// Items of each task, length and depth.
    pub items: u64,
    /// Seed of words, numbers and places.
    pub seed: u64,
}

impl Default for Grid {
    /// One item of 4096 tokens.
    fn default() -> Self {
        Self { lengths: vec![4096], depths: Vec::new(), items: 1, seed: 0 }
    }
}

impl Grid {
    /// The samples of tasks by name ([`task_names`]), task by task with shorter prompts first. Includes only those
    /// recorded prompts that have one of the lengths.
    ///
    /// # Errors
    /// [`EvalError::Unknown`]; as [`load::needle_7m`].
    pub fn samples<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Result<Vec<Sample>> {
        let mut lengths = self.lengths.clone();
        lengths.sort_unstable();
        lengths.dedup();
        let mut samples = Vec::new();
        for name in task_names(names)? {
            for &length in &lengths {
                if name == NEEDLE_7M {
                    let recorded = load::needle_7m()?.into_iter().filter(|item| item.context_tokens == length);
                    samples.extend(recorded.take(self.items as usize).map(Sample::Given));
                } else {
                    samples.extend(self.generated(tasks::find(name)?, length));
                }
            }
        }
        Ok(samples)
    }

    fn generated(&self, task: &'static Task, length: usize) -> impl Iterator<Item = Sample> {
        let spec = ItemSpec::new(length, self.seed);
        let places: Vec<ItemSpec> = match self.depths.as_slice() {
            depths if task.takes_depth && !depths.is_empty() => depths.iter().map(|&depth| spec.depth(depth)).collect(),
            _ => vec![spec],
        };
        let items = self.items;
        places
            .into_iter()
            .flat_map(move |spec| (0..items).map(move |index| spec.index(index)))
            .map(move |spec| Sample::Generated { task, spec })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::tokenizer_for_tests;

    fn ids(grid: &Grid, names: &[&str]) -> Vec<String> {
        let samples = grid.samples(names.iter().copied()).unwrap();
        samples.iter().map(|sample| sample.id().into_owned()).collect()
    }

    #[test]
    fn groups_are_taken_apart_and_doubles_dropped() {
        assert_eq!(task_names(["ruler"]).unwrap(), tasks::ruler().collect::<Vec<_>>());
        assert_eq!(task_names(["vt", "keyed", "keyed_4", "needle-7m"]).unwrap().len(), 6);
        assert_eq!(task_names(["all"]).unwrap().len(), tasks::ALL.len());
        let error = task_names(["niha"]).unwrap_err().to_string();
        let start = "`niha` is not a task: expected one of ruler, keyed, all, needle-7m, niah, ";
        assert!(error.starts_with(start), "{error}");
    }

    #[test]
    fn a_grid_has_its_lengths_depths_and_items() {
        let grid = Grid { lengths: vec![2048, 1024, 2048], depths: vec![0.0, 0.5], items: 2, seed: 7 };
        let passkeys = ids(&grid, &["passkey"]);
        assert_eq!(passkeys.len(), 8);
        assert_eq!((&*passkeys[0], &*passkeys[7]), ("passkey-1024-d0-i0-s7", "passkey-2048-d0.5-i1-s7"));
        // Words at several places have no depth.
        assert_eq!(
            ids(&grid, &["keyed_4"]),
            ["keyed_4-1024-i0-s7", "keyed_4-1024-i1-s7", "keyed_4-2048-i0-s7", "keyed_4-2048-i1-s7"]
        );
    }

    #[test]
    fn recorded_prompts_have_their_own_lengths() {
        let grid = |lengths| Grid { lengths, items: 12, ..Grid::default() };
        assert_eq!(ids(&grid(vec![4096, 32768]), &["needle-7m"]).len(), 22);
        assert_eq!(ids(&grid(vec![2048]), &["needle-7m"]).len(), 0);
    }

    #[test]
    fn items_are_as_their_samples_say() {
        for sample in (Grid { lengths: vec![2300], ..Grid::default() }).samples(["all"]).unwrap() {
            let item = sample.item(tokenizer_for_tests()).unwrap().unwrap().into_owned();
            let said = (sample.id().into_owned(), sample.task(), sample.context_tokens());
            assert_eq!(said, (item.id.clone(), item.task.as_str(), item.context_tokens));
        }
    }

    #[test]
    fn a_digest_follows_what_was_read() {
        let mut item = load::needle_7m().unwrap().remove(0);
        let digest = |item: &Item| Sample::Given(item.clone()).digest().unwrap();
        let before = digest(&item);
        assert_eq!((before.len(), &before), (16, &digest(&item)));
        item.references[0].push('1');
        assert_ne!(digest(&item), before);
    }
}
