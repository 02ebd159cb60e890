//! [`Plan`]: the prefills and answers that a run still has to compute, and an estimate of their time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::runner::{Runner, SHORT};
use super::sample::Sample;
use super::speed::{Speed, Time};
use super::trial::Trial;
use crate::error::Result;
use crate::report::grouped;

/// The trials of a run, counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Trials of the same task, length and method, in running order.
    pub counts: Vec<Count>,
    /// Number of different samples.
    pub samples: usize,
    /// Estimated time for making the prompts of generated tasks, in seconds.
    pub prompt_seconds: f64,
    /// Memory of the weights and of the largest KV cache.
    pub memory: Memory,
}

/// Trials of one task, length and method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// The task's name.
    pub task: String,
    /// The requested length in tokens, which a prompt does not exceed except by its chat template.
    pub context_tokens: usize,
    /// The method as requested.
    pub method: String,
    /// Number of prefills: samples times chunk sizes.
    pub prefills: usize,
    /// The most tokens that an answer may have; 0 for a passage, which has no answer.
    pub answer_tokens: usize,
}

/// Memory that a run needs besides activations, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The weights.
    pub weights: u64,
    /// The KV cache of one sequence at [`Self::context_tokens`].
    pub kv_cache: u64,
    /// The longest requested length in tokens.
    pub context_tokens: usize,
}

impl Plan {
    /// Number of prefills.
    pub fn prefills(&self) -> usize {
        self.counts.iter().map(|count| count.prefills).sum()
    }

    /// Tokens of all prefills together.
    pub fn tokens(&self) -> u64 {
        self.counts.iter().map(|count| count.prefills as u64 * count.context_tokens as u64).sum()
    }

    /// Numbers of prefills by method, with the number of each length: a row for each method, in running order.
    pub fn by_method(&self) -> Vec<(&str, BTreeMap<usize, usize>)> {
        let methods = grouped(&self.counts, |count| &count.method);
        let lengths = |counts: &[&Count]| {
            let mut lengths = BTreeMap::new();
            counts.iter().for_each(|count| *lengths.entry(count.context_tokens).or_default() += count.prefills);
            lengths
        };
        methods.iter().map(|counts| (counts[0].method.as_str(), lengths(counts))).collect()
    }

    /// The estimated time if every method takes as long as exact attention and every answer has as many tokens as its
    /// task allows.
    pub fn time(&self, speed: &Speed) -> Time {
        let times = self.counts.iter().map(|count| speed.of(count.context_tokens, count.answer_tokens, count.prefills));
        times.fold(Time { prompts: self.prompt_seconds, ..Time::default() }, Time::plus)
    }

    /// The estimate of one trial, in seconds; 0 for a trial that is not planned.
    pub fn seconds_of(&self, speed: &Speed, task: &str, context_tokens: usize) -> f64 {
        let count = self.counts.iter().find(|count| count.task == task && count.context_tokens == context_tokens);
        count.map_or(0.0, |count| speed.of(context_tokens, count.answer_tokens, 1).total())
    }
}

impl Runner<'_> {
    /// Counts trials of [`Runner::pending`]. Makes one short item of each generated task, to learn how long its answers
    /// may be and how long a prompt takes.
    ///
    /// # Errors
    /// As [`crate::tasks::Task::generate`].
    pub fn plan(&self, trials: &[Trial]) -> Result<Plan> {
        let mut answers: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut made_tokens, mut making) = (0, Duration::ZERO);
        for trial in trials {
            let task = trial.sample.task();
            let tokens = match trial.sample {
                Sample::Given(item) => item.max_new_tokens,
                Sample::Passage(_) => 0,
                Sample::Generated { .. } if answers.contains_key(task) => continue,
                Sample::Generated { task, spec } => {
                    let mut spec = *spec;
                    spec.num_tokens = spec.num_tokens.min(SHORT);
                    let start = Instant::now();
                    let item = task.generate(&self.model.tokenizer, &spec)?;
                    made_tokens += spec.num_tokens;
                    making += start.elapsed();
                    item.max_new_tokens
                }
            };
            let most = answers.entry(task).or_default();
            *most = tokens.max(*most);
        }
        let key =
            |trial: &Trial| (trial.sample.task().to_owned(), trial.sample.context_tokens(), trial.key.method.clone());
        let counts = grouped(trials, key).into_iter().map(|trials| {
            let (task, context_tokens, method) = key(trials[0]);
            let answer_tokens = answers.get(task.as_str()).copied().unwrap_or_default();
            Count { task, context_tokens, method, prefills: trials.len(), answer_tokens }
        });
        let context_tokens = trials.iter().map(|trial| trial.sample.context_tokens()).max().unwrap_or_default();
        // The trials of a sample follow each other.
        let samples = || trials.chunk_by(|a, b| a.key.sample == b.key.sample);
        let generated = samples().map(|trials| match trials[0].sample {
            Sample::Generated { spec, .. } => spec.num_tokens,
            Sample::Given(_) | Sample::Passage(_) => 0,
        });
        let share = generated.sum::<usize>() as f64 / made_tokens.max(1) as f64;
        Ok(Plan {
            counts: counts.collect(),
            samples: samples().count(),
            prompt_seconds: share * making.as_secs_f64(),
            memory: Memory {
                weights: self.model.decoder.weight_bytes(),
                kv_cache: self.cache_bytes(context_tokens),
                context_tokens,
            },
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn count(task: &str, context_tokens: usize, method: &str, prefills: usize, answer_tokens: usize) -> Count {
        Count { task: task.to_owned(), context_tokens, method: method.to_owned(), prefills, answer_tokens }
    }

    fn plan() -> Plan {
        Plan {
            counts: vec![
                count("a", 1000, "dense", 2, 10),
                count("a", 1000, "s2o", 3, 10),
                count("b", 1000, "dense", 1, 0),
                count("b", 4000, "dense", 1, 20),
            ],
            samples: 5,
            prompt_seconds: 3.0,
            memory: Memory { weights: 1, kv_cache: 1, context_tokens: 4000 },
        }
    }

    #[test]
    fn prefills_are_counted_by_method_and_length() {
        let plan = plan();
        assert_eq!((plan.prefills(), plan.tokens()), (7, 10_000));
        let dense = BTreeMap::from([(1000, 3), (4000, 1)]);
        assert_eq!(plan.by_method(), [("dense", dense), ("s2o", BTreeMap::from([(1000, 3)]))]);
    }

    #[test]
    fn the_time_is_that_of_all_trials() {
        let speed = Speed {
            tokens: 500,
            linear_seconds: 1.0,
            attention_seconds: 0.5,
            step_seconds: 0.1,
            weights: 100,
            kv: 0.0,
        };
        let time = plan().time(&speed);
        // 6 prefills of twice the length and one of eight times the length; 50 and 20 tokens of answers.
        assert!((time.linear - (6.0 * 2.0 + 8.0)).abs() < 1e-9, "{time:?}");
        assert!((time.attention - (6.0 * 2.0 + 32.0)).abs() < 1e-9, "{time:?}");
        assert!((time.answers - 7.0).abs() < 1e-9, "{time:?}");
        assert!((time.total() - (20.0 + 44.0 + 7.0 + 3.0)).abs() < 1e-9, "{time:?}");
        let one = plan().seconds_of(&speed, "b", 4000);
        assert!((one - (8.0 + 32.0 + 2.0)).abs() < 1e-9, "{one}");
        assert_eq!(plan().seconds_of(&speed, "c", 4000), 0.0);
    }
}
