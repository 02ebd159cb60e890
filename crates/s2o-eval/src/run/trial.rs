//! [`Trial`]: one sample with one method, and the trials that a run still has to compute.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use s2o_models::Chunk;

use super::journal::Journal;
use super::outcome::{Key, Outcome};
use super::runner::Runner;
use super::sample::Sample;
use crate::error::{EvalError, Result};

/// One sample with one method and one chunk size.
#[derive(Debug)]
pub struct Trial<'s> {
    /// The sample.
    pub sample: &'s Sample,
    /// The key of its outcome.
    pub key: Key,
    pub(super) method: usize,
    pub(super) chunk: Chunk,
}

impl Runner<'_> {
    /// The trials that the journal lacks, in running order: for each sample all methods and chunk sizes.
    ///
    /// # Errors
    /// [`EvalError::OtherRun`] if the journal's outcome of a sample has a different digest; [`EvalError::WrongInput`]
    /// if two different samples have the same id.
    pub fn pending<'s>(&self, samples: &'s [Sample], journal: &Journal) -> Result<Vec<Trial<'s>>> {
        self.missing(samples, journal.outcomes(), journal.path())
    }

    /// [`Self::pending`] for the outcomes of the journal at `path`, which need not exist or be open.
    ///
    /// # Errors
    /// As [`Self::pending`].
    pub fn missing<'s>(&self, samples: &'s [Sample], outcomes: &[Outcome], path: &Path) -> Result<Vec<Trial<'s>>> {
        let known: HashMap<&str, &Outcome> =
            outcomes.iter().map(|outcome| (outcome.key.sample.as_str(), outcome)).collect();
        let done: HashSet<&Key> = outcomes.iter().map(|outcome| &outcome.key).collect();
        let (mut trials, mut planned) = (Vec::new(), HashSet::new());
        let mut digests = HashMap::new();
        for sample in samples {
            let id = sample.id();
            let digest = sample.digest();
            if *digests.entry(id.clone()).or_insert_with(|| digest.clone()) != digest {
                let expected = "another id for each different item";
                return Err(EvalError::wrong("items to evaluate", expected, format!("two items with the id {id}")));
            }
            if let Some(outcome) = known.get(&*id)
                && outcome.digest != digest
            {
                let said = |digest: &Option<String>| digest.as_deref().unwrap_or("none").to_owned();
                return Err(EvalError::OtherRun {
                    path: path.to_owned(),
                    expected: format!("{id} with digest {}", said(&digest)),
                    got: said(&outcome.digest),
                });
            }
            for (method, (name, _)) in self.methods.iter().enumerate() {
                for &chunk in &self.chunks {
                    let setting = self.setting(chunk);
                    let key = Key { sample: id.clone().into_owned(), method: name.clone(), setting };
                    if !done.contains(&key) && planned.insert(key.clone()) {
                        trials.push(Trial { sample, key, method, chunk });
                    }
                }
            }
        }
        Ok(trials)
    }
}
