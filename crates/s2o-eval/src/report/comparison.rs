//! [`Comparison`]: each method compared with exact attention on the same items, and the items whose scores differ.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::aggregate::{grouped, paired};
use crate::method::DENSE;
use crate::metrics::median;
use crate::run::{Outcome, SampleResult};

/// The task name of comparisons over all tasks, each with the same weight.
pub const ALL_TASKS: &str = "all tasks";

/// One method at one length: its mean score, density and time, and its difference from exact attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The task, or [`ALL_TASKS`].
    pub task: String,
    /// The requested length in tokens.
    pub context_tokens: usize,
    /// The method as requested.
    pub method: String,
    /// The requested tokens per prefill chunk.
    pub chunk: String,
    /// Number of tasks.
    pub tasks: usize,
    /// Number of items.
    pub items: usize,
    /// Mean score from 0 to 1.
    pub score: f64,
    /// Mean score with 0 for answers that do not begin with a reference ([`Outcome::strict_score`]).
    pub strict_score: f64,
    /// Mean score minus that of exact attention on the same items with the same chunk size; `None` for exact attention
    /// itself, and if it was not run.
    pub difference: Option<f64>,
    /// Lower end of the difference's 95 % interval ([`paired_interval`]).
    pub difference_low: Option<f64>,
    /// Upper end of the interval.
    pub difference_high: Option<f64>,
    /// Number of items with a lower score than exact attention.
    pub worse: Option<usize>,
    /// Number of items with a higher score.
    pub better: Option<usize>,
    /// Mean density.
    pub density: f64,
    /// Median time of the prefills, in seconds.
    pub prefill_seconds: f64,
    /// Median time of exact attention's prefills over that of the method's.
    pub speed_up: Option<f64>,
}

/// An item whose score with a method is not that of exact attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DifferingItem {
    /// The sample's id.
    pub sample: String,
    /// The requested length in tokens.
    pub context_tokens: usize,
    /// The method as requested.
    pub method: String,
    /// The requested tokens per prefill chunk.
    pub chunk: String,
    /// The method's score.
    pub score: f64,
    /// The score of exact attention.
    pub dense_score: f64,
    /// The right answers, separated by a bar.
    pub references: String,
    /// The method's answer.
    pub prediction: String,
    /// The answer of exact attention.
    pub dense_prediction: String,
}

/// Compares all methods with exact attention: for each length, first each task, then [`ALL_TASKS`]. Lengths ascend;
/// tasks, methods and chunk sizes keep the order of their first occurrence. Perplexity is not compared. Samples that were
/// not run with every method are left out, as in [`super::rows`]. All outcomes must be of one model, precision, device
/// and chat template.
pub fn comparisons(outcomes: &[Outcome]) -> Vec<Comparison> {
    let pairs = pairs(outcomes);
    let mut lengths = grouped(&pairs, |pair| pair.own.context_tokens);
    lengths.sort_by_key(|pairs| pairs[0].own.context_tokens);
    let mut all = Vec::new();
    for pairs in lengths {
        for task in grouped(pairs.iter().copied(), |pair| &pair.own.task) {
            all.extend(variants(&task).iter().map(|pairs| comparison(&pairs[0].own.task, pairs)));
        }
        all.extend(variants(&pairs).iter().map(|pairs| comparison(ALL_TASKS, pairs)));
    }
    all
}

/// The items whose score with a method differs from that with exact attention, in the order of the outcomes.
pub fn differing_items(outcomes: &[Outcome]) -> Vec<DifferingItem> {
    let differing = |pair: &Pair| {
        let (Some(dense), Some(score), Some(dense_score)) =
            (pair.dense, pair.own.score(), pair.dense.and_then(Outcome::score))
        else {
            return None;
        };
        let (prediction, references) = answer(pair.own)?;
        let (dense_prediction, _) = answer(dense)?;
        (score != dense_score).then(|| DifferingItem {
            sample: pair.own.key.sample.clone(),
            context_tokens: pair.own.context_tokens,
            method: pair.own.key.method.clone(),
            chunk: pair.own.key.setting.chunk.clone(),
            score,
            dense_score,
            references: references.join(" | "),
            prediction: prediction.to_owned(),
            dense_prediction: dense_prediction.to_owned(),
        })
    };
    pairs(outcomes).iter().filter_map(differing).collect()
}

/// The mean of paired differences from -1 to 1 and its 95 % interval, from pairs of weight and difference. The weights
/// add up to 1. It is the interval of Agresti and Min (2005): that of the normal distribution after two further pairs,
/// whose differences add up to nothing. So it has a width even if no difference was found, about 2 / n for n items.
pub fn paired_interval(differences: &[(f64, f64)]) -> (f64, f64, f64) {
    // The quantile of the normal distribution for 95 %.
    const Z: f64 = 1.959_963_984_540_054;
    let sum = |value: fn(f64) -> f64| differences.iter().map(|&(weight, d)| weight * value(d)).sum::<f64>();
    let (mean, squares) = (sum(|d| d), sum(|d| d * d));
    // As many items of equal weight have a mean that varies as much.
    let n = 1.0 / differences.iter().map(|(weight, _)| weight * weight).sum::<f64>();
    let centre = mean * n / (n + 2.0);
    let variance = (squares * n + 1.0) / (n + 2.0) - centre * centre;
    let half = Z * (variance / (n + 2.0)).sqrt();
    (mean, (centre - half).max(-1.0), (centre + half).min(1.0))
}

/// An outcome with a score, and that of exact attention on the same sample with the same setting.
struct Pair<'o> {
    own: &'o Outcome,
    dense: Option<&'o Outcome>,
}

fn pairs(outcomes: &[Outcome]) -> Vec<Pair<'_>> {
    let outcomes = paired(outcomes);
    let exact = outcomes.iter().copied().filter(|outcome| outcome.key.method == DENSE);
    let exact: HashMap<_, _> = exact.map(|outcome| ((&outcome.key.sample, &outcome.key.setting), outcome)).collect();
    let scored = outcomes.iter().copied().filter(|outcome| outcome.score().is_some());
    scored.map(|own| Pair { own, dense: exact.get(&(&own.key.sample, &own.key.setting)).copied() }).collect()
}

fn variants<'p, 'o>(pairs: &[&'p Pair<'o>]) -> Vec<Vec<&'p Pair<'o>>> {
    grouped(pairs.iter().copied(), |pair| (&pair.own.key.method, &pair.own.key.setting.chunk))
}

fn answer(outcome: &Outcome) -> Option<(&str, &[String])> {
    match &outcome.result {
        SampleResult::Answer { prediction, references, .. } => Some((prediction, references)),
        SampleResult::Perplexity { .. } => None,
    }
}

/// Compares the pairs of one method and chunk size. Every task has the same weight.
fn comparison(task: &str, pairs: &[&Pair]) -> Comparison {
    let tasks = grouped(pairs.iter().copied(), |pair| &pair.own.task);
    let weighted: Vec<(f64, &Pair)> = tasks
        .iter()
        .flat_map(|pairs| pairs.iter().map(|pair| (1.0 / (tasks.len() * pairs.len()) as f64, *pair)))
        .collect();
    let mean = |value: fn(&Outcome) -> f64| weighted.iter().map(|(weight, pair)| weight * value(pair.own)).sum::<f64>();
    let own = pairs[0].own;
    let differences: Option<Vec<(f64, f64)>> =
        weighted.iter().map(|(weight, pair)| Some((*weight, pair.own.score()? - pair.dense?.score()?))).collect();
    let differences = differences.filter(|_| own.key.method != DENSE);
    let interval = differences.as_deref().map(paired_interval);
    let count = |is: fn(f64) -> bool| {
        differences.as_ref().map(|differences| differences.iter().filter(|(_, difference)| is(*difference)).count())
    };
    let dense_seconds: Option<Vec<f64>> = pairs.iter().map(|pair| Some(pair.dense?.prefill_seconds)).collect();
    let prefill_seconds = median(pairs.iter().map(|pair| pair.own.prefill_seconds).collect());
    Comparison {
        task: task.to_owned(),
        context_tokens: own.context_tokens,
        method: own.key.method.clone(),
        chunk: own.key.setting.chunk.clone(),
        tasks: tasks.len(),
        items: pairs.len(),
        score: mean(|outcome| outcome.score().unwrap_or_default()),
        strict_score: mean(|outcome| outcome.strict_score().unwrap_or_default()),
        difference: interval.map(|(mean, ..)| mean),
        difference_low: interval.map(|(_, low, _)| low),
        difference_high: interval.map(|(.., high)| high),
        worse: count(|difference| difference < 0.0),
        better: count(|difference| difference > 0.0),
        density: mean(|outcome| outcome.density),
        prefill_seconds,
        speed_up: dense_seconds.map(|seconds| median(seconds) / prefill_seconds).filter(|ratio| ratio.is_finite()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `n` items of equal weight, of which some have a difference.
    fn interval(n: usize, differences: &[f64]) -> (f64, f64, f64) {
        let rest = std::iter::repeat_n(&0.0, n - differences.len());
        let all: Vec<(f64, f64)> = differences.iter().chain(rest).map(|d| (1.0 / n as f64, *d)).collect();
        paired_interval(&all)
    }

    #[test]
    fn paired_intervals_by_hand() {
        let close = |got: (f64, f64, f64), expected: (f64, f64, f64)| {
            let off = (got.0 - expected.0).abs().max((got.1 - expected.1).abs()).max((got.2 - expected.2).abs());
            assert!(off < 1e-4, "{got:?} {expected:?}");
        };
        // Nothing differs: 1.96 / 100.
        close(interval(98, &[]), (0.0, -0.0196, 0.0196));
        // 10 of 98 are worse: mean -0.1 of 100, variance 0.11 - 0.01.
        close(interval(98, &[-1.0; 10]), (-10.0 / 98.0, -0.1 - 0.06198, -0.1 + 0.06198));
        // The same number of better ones.
        close(interval(98, &[1.0, -1.0]), (0.0, -0.03395, 0.03395));
        // All differ: not beyond -1.
        close(interval(4, &[-1.0; 4]), (-1.0, -1.0, -0.1677));
        // Two tasks of 2 and 6 items are like 6 items: 4 / (1/2 + 1/6).
        let tasks: Vec<(f64, f64)> = [(0.25, 0.0); 2].into_iter().chain([(1.0 / 12.0, 0.0); 6]).collect();
        close(paired_interval(&tasks), interval(6, &[]));
    }
}
