//! The work that `run` has to do and its estimated cost, shown before the first sample.

use std::collections::BTreeSet;

use anyhow::Result;
use s2o_eval::run::{Plan, Runner, Speed, Trial};

use crate::layout::{Look, duration, grouped, seconds};
use crate::progress;

/// The planned work and the measured speed.
pub struct Estimate {
    plan: Plan,
    speed: Speed,
}

impl Estimate {
    /// Counts the trials. Measures the speed, unless it is known from earlier trials.
    pub fn of(runner: &Runner, trials: &[Trial], known: Option<Speed>) -> Result<Self> {
        let plan = runner.plan(trials)?;
        let speed = match known {
            Some(speed) => speed,
            None => {
                progress::say("measuring the speed on this device, to estimate the time");
                runner.speed(plan.memory.context_tokens)?
            }
        };
        Ok(Self { plan, speed })
    }

    /// The measured speed.
    pub fn speed(&self) -> Speed {
        self.speed
    }

    /// The estimated time of all trials, in milliseconds.
    pub fn milliseconds(&self) -> u64 {
        let counts = &self.plan.counts;
        counts.iter().map(|count| count.prefills as u64 * self.milliseconds_of(&count.task, count.context_tokens)).sum()
    }

    /// The estimated time of one trial, in milliseconds, at least one.
    pub fn milliseconds_of(&self, task: &str, context_tokens: usize) -> u64 {
        (1e3 * self.plan.seconds_of(&self.speed, task, context_tokens)).ceil().max(1.0) as u64
    }

    /// Counts, time and memory.
    pub fn text(&self) -> String {
        let Self { plan, speed } = self;
        let lengths: BTreeSet<usize> = plan.counts.iter().map(|count| count.context_tokens).collect();
        let header =
            ["prefills of".to_owned()].into_iter().chain(lengths.iter().map(|tokens| format!("{tokens} tokens")));
        let header: Vec<String> = header.collect();
        let mut table = Look::Plain.table(header.iter().map(String::as_str));
        for (method, prefills) in plan.by_method() {
            let cells = lengths.iter().map(|tokens| prefills.get(tokens).map(ToString::to_string).unwrap_or_default());
            table.add_row([method.to_owned()].into_iter().chain(cells));
        }
        let time = plan.time(speed);
        let measured = speed.linear_seconds + speed.attention_seconds;
        let memory = plan.memory;
        format!(
            "to do     {} samples, {} prefills, {} tokens to prefill\n{table}\n\
             time      about {} if every method takes as long as exact attention and no answer ends early:\n          \
             {} in attention, {} in the rest of the prefills, {} for answers, {} to make prompts;\n          \
             an estimate from {} tokens prefilled in {} and {} per generated token\n\
             memory    {} GB of weights, {} GB of KV cache for each sequence of {} tokens, and activations\n",
            grouped(plan.samples as f64),
            grouped(plan.prefills() as f64),
            grouped(plan.tokens() as f64),
            duration(time.total()),
            duration(time.attention),
            duration(time.linear),
            duration(time.answers),
            duration(time.prompts),
            grouped(speed.tokens as f64),
            seconds(measured),
            seconds(speed.step_seconds),
            gigabytes(memory.weights),
            gigabytes(memory.kv_cache),
            grouped(memory.context_tokens as f64),
        )
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}
