//! [`Row`]: the combined outcomes of one task, length and method.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{EvalError, Result};
use crate::method::DENSE;
use crate::metrics::median;
use crate::run::{Key, Outcome, SampleResult, Setting};
use crate::tasks::is_ruler;

/// The task name of rows that hold RULER's mean over its tasks.
pub const RULER_AVERAGE: &str = "ruler average";

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The task.
    pub task: String,
    /// A group of its samples, or empty for all of them.
    pub group: String,
    /// The requested length in tokens.
    pub context_tokens: usize,
    /// The method as requested.
    pub method: String,
    /// The requested tokens per prefill chunk.
    pub chunk: String,
    /// The number of samples.
    pub items: usize,
    /// Mean score; `None` for perplexity.
    pub score: Option<f64>,
    /// Lower end of the score's 95 % interval; `None` for a mean over tasks.
    pub score_low: Option<f64>,
    /// Upper end of the interval.
    pub score_high: Option<f64>,
    /// Mean score with 0 for answers that do not begin with a reference ([`Outcome::strict_score`]).
    pub strict_score: Option<f64>,
    /// Mean density.
    pub density: f64,
    /// Median time of the prefill, in seconds.
    pub prefill_seconds: f64,
    /// Number of samples whose answer differs from that with the first chunk size; `None` if there is only one size.
    pub changed_by_chunks: Option<usize>,
    /// Perplexity of passages.
    pub perplexity: Option<f64>,
    /// Share of the passages' positions whose likeliest token is that of the method `dense`, if it was run.
    pub top1_agreement: Option<f64>,
    /// The model's name.
    pub model: String,
    /// Its precision.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The chat template.
    pub template: String,
}

/// The outcomes that can be compared: those of samples that were run with every method and chunk size that occurs with
/// their setting, task and length.
pub(super) fn paired(outcomes: &[Outcome]) -> Vec<&Outcome> {
    let places = grouped(outcomes, |outcome| (without_chunk(outcome), &outcome.task, outcome.context_tokens));
    let shared = places.iter().flat_map(|place| {
        let variants = grouped(place.iter().copied(), variant).len();
        let samples = grouped(place.iter().copied(), |outcome| &outcome.key.sample);
        samples.into_iter().filter(move |sample| sample.len() == variants).flatten()
    });
    let shared: HashSet<&Key> = shared.map(|outcome| &outcome.key).collect();
    outcomes.iter().filter(|outcome| shared.contains(&outcome.key)).collect()
}

fn variant(outcome: &Outcome) -> (&str, &str) {
    (&outcome.key.method, &outcome.key.setting.chunk)
}

/// A sentence on the outcomes that [`rows`] leaves out; `None` if there are none.
pub fn unpaired(outcomes: &[Outcome]) -> Option<String> {
    let count = outcomes.len() - paired(outcomes).len();
    let count = (count > 0).then_some(count)?;
    Some(format!(
        "{count} of {} outcomes are left out: their samples were not run with every method of their task and length.",
        outcomes.len()
    ))
}

/// Combines outcomes into rows. All methods of a row's task and length have the same samples; other outcomes are left
/// out ([`unpaired`]). Models, tasks, methods and chunks keep the order of their first occurrence; lengths
/// ascend. Groups follow their task, and [`RULER_AVERAGE`] follows if there are two or more of RULER's tasks.
pub fn rows(outcomes: &[Outcome]) -> Vec<Row> {
    let chunks = ByChunk::new(outcomes);
    let dense = dense_predictions(outcomes);
    let mut order = Order::default();
    let mut cells: BTreeMap<SortKey, Vec<&Outcome>> = BTreeMap::new();
    for outcome in paired(outcomes) {
        for group in [""].into_iter().chain(outcome.groups.iter().map(String::as_str)) {
            cells.entry(order.key(outcome, group)).or_default().push(outcome);
        }
    }
    let mut rows: Vec<Row> =
        cells.into_iter().map(|(key, cell)| row(order.groups[key.group], &cell, &chunks, &dense)).collect();
    rows.extend(ruler_averages(&rows));
    rows
}

/// Writes rows to a CSV file: those of [`rows`], or comparisons.
///
/// # Errors
/// [`EvalError::Write`].
pub fn write_csv<R: Serialize>(path: &Path, rows: &[R]) -> Result<()> {
    let failed = |error: csv::Error| EvalError::Write { path: path.to_owned(), source: error.into() };
    let mut writer = csv::Writer::from_path(path).map_err(failed)?;
    rows.iter().try_for_each(|row| writer.serialize(row)).map_err(failed)?;
    writer.flush().map_err(|source| EvalError::Write { path: path.to_owned(), source })
}

/// Sort order of rows, most significant field first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SortKey {
    setting: usize,
    task: usize,
    group: usize,
    context_tokens: usize,
    method: usize,
    chunk: usize,
}

/// Distinct values in the order of their first occurrence.
#[derive(Default)]
struct Order<'o> {
    settings: Vec<Setting>,
    tasks: Vec<&'o str>,
    groups: Vec<&'o str>,
    methods: Vec<&'o str>,
    chunks: Vec<&'o str>,
}

impl<'o> Order<'o> {
    fn key(&mut self, outcome: &'o Outcome, group: &'o str) -> SortKey {
        SortKey {
            setting: index_of(&mut self.settings, without_chunk(outcome)),
            task: index_of(&mut self.tasks, outcome.task.as_str()),
            group: index_of(&mut self.groups, group),
            context_tokens: outcome.context_tokens,
            method: index_of(&mut self.methods, outcome.key.method.as_str()),
            chunk: index_of(&mut self.chunks, outcome.key.setting.chunk.as_str()),
        }
    }
}

fn index_of<T: PartialEq>(seen: &mut Vec<T>, value: T) -> usize {
    seen.iter().position(|there| *there == value).unwrap_or_else(|| {
        seen.push(value);
        seen.len() - 1
    })
}

fn without_chunk(outcome: &Outcome) -> Setting {
    Setting { chunk: String::new(), ..outcome.key.setting.clone() }
}

/// Key of a sample's prediction with the first chunk size: sample, method, setting without chunk.
type Sampled<'o> = (&'o str, &'o str, Setting);

struct ByChunk<'o> {
    first: &'o str,
    are_several: bool,
    predictions: HashMap<Sampled<'o>, &'o str>,
}

impl<'o> ByChunk<'o> {
    fn new(outcomes: &'o [Outcome]) -> Self {
        let first = outcomes.first().map_or("", |outcome| outcome.key.setting.chunk.as_str());
        let are_several = outcomes.iter().any(|outcome| outcome.key.setting.chunk != first);
        let of_first = outcomes.iter().filter(|outcome| outcome.key.setting.chunk == first);
        let predictions = of_first.filter_map(|outcome| Some((sampled(outcome), prediction(outcome)?))).collect();
        Self { first, are_several, predictions }
    }

    /// `None` if there is nothing to compare.
    fn changed(&self, cell: &[&'o Outcome]) -> Option<usize> {
        let changed = |outcome: &&&'o Outcome| match (prediction(outcome), self.predictions.get(&sampled(outcome))) {
            (Some(now), Some(first)) => now.trim() != first.trim(),
            _ => false,
        };
        let compares = |outcome: &&'o Outcome| self.predictions.contains_key(&sampled(outcome));
        let is_first = cell.iter().all(|outcome| outcome.key.setting.chunk == self.first);
        (self.are_several && (is_first || cell.iter().any(compares))).then(|| cell.iter().filter(changed).count())
    }
}

fn sampled(outcome: &Outcome) -> Sampled<'_> {
    (&outcome.key.sample, &outcome.key.method, without_chunk(outcome))
}

fn prediction(outcome: &Outcome) -> Option<&str> {
    match &outcome.result {
        SampleResult::Answer { prediction, .. } => Some(prediction),
        SampleResult::Perplexity { .. } => None,
    }
}

/// Likeliest tokens of exact attention, by passage and setting.
fn dense_predictions(outcomes: &[Outcome]) -> HashMap<(&str, &Setting), &[u32]> {
    let dense = outcomes.iter().filter(|outcome| outcome.key.method == DENSE);
    let predicted = dense.filter_map(|outcome| match &outcome.result {
        SampleResult::Perplexity { likeliest, .. } => {
            Some(((outcome.key.sample.as_str(), &outcome.key.setting), likeliest.as_slice()))
        }
        SampleResult::Answer { .. } => None,
    });
    predicted.collect()
}

fn row<'o>(group: &str, cell: &[&'o Outcome], chunks: &ByChunk<'o>, dense: &HashMap<(&str, &Setting), &[u32]>) -> Row {
    let first = cell[0];
    let setting = &first.key.setting;
    let scores: Vec<f64> = cell.iter().filter_map(|outcome| outcome.score()).collect();
    let score = mean(&scores);
    let interval = score.map(|score| wilson(score, scores.len()));
    let (mut losses, mut tokens, mut agreed, mut compared) = (0.0, 0, 0, 0);
    for outcome in cell {
        let SampleResult::Perplexity { loss, likeliest } = &outcome.result else { continue };
        losses += loss * likeliest.len() as f64;
        tokens += likeliest.len();
        if let Some(dense) = dense.get(&(outcome.key.sample.as_str(), &outcome.key.setting)) {
            agreed += likeliest.iter().zip(*dense).filter(|(a, b)| a == b).count();
            compared += likeliest.len();
        }
    }
    let densities: Vec<f64> = cell.iter().map(|outcome| outcome.density).collect();
    Row {
        task: first.task.clone(),
        group: group.to_owned(),
        context_tokens: first.context_tokens,
        method: first.key.method.clone(),
        chunk: setting.chunk.clone(),
        items: cell.len(),
        score,
        score_low: interval.map(|(low, _)| low),
        score_high: interval.map(|(_, high)| high),
        strict_score: mean(&cell.iter().filter_map(|outcome| outcome.strict_score()).collect::<Vec<_>>()),
        density: mean(&densities).unwrap_or_default(),
        prefill_seconds: median(cell.iter().map(|outcome| outcome.prefill_seconds).collect()),
        changed_by_chunks: chunks.changed(cell),
        perplexity: (tokens > 0).then(|| (losses / tokens as f64).exp()),
        top1_agreement: (compared > 0).then(|| agreed as f64 / compared as f64),
        model: setting.model.clone(),
        dtype: setting.dtype.clone(),
        device: setting.device.clone(),
        template: setting.template.to_string(),
    }
}

/// RULER's mean: every task has the same weight, whatever its number of items.
fn ruler_averages(rows: &[Row]) -> Vec<Row> {
    let tasks = rows.iter().filter(|row| row.group.is_empty() && is_ruler(&row.task));
    let columns = grouped(tasks, |row| {
        let setting = [&row.model, &row.dtype, &row.device, &row.template, &row.method, &row.chunk];
        (row.context_tokens, row.task.starts_with("ruler/"), setting)
    });
    columns.iter().filter(|column| column.len() > 1).map(|column| average(column)).collect()
}

/// Values in the order in which they first occur.
pub fn distinct<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

/// Distinct values in ascending order.
pub fn ascending<T: PartialOrd>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut ascending = distinct(values);
    ascending.sort_by(|a, b| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    ascending
}

/// The items with the same key, in the order in which the keys first occur.
pub fn grouped<'i, T, K: PartialEq>(
    items: impl IntoIterator<Item = &'i T>,
    key: impl Fn(&'i T) -> K,
) -> Vec<Vec<&'i T>> {
    let mut groups: Vec<(K, Vec<&'i T>)> = Vec::new();
    for item in items {
        let key = key(item);
        match groups.iter_mut().find(|(there, _)| *there == key) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

fn average(tasks: &[&Row]) -> Row {
    let mean_of = |value: fn(&Row) -> f64| mean(&tasks.iter().map(|row| value(row)).collect::<Vec<_>>());
    Row {
        task: RULER_AVERAGE.to_owned(),
        items: tasks.iter().map(|row| row.items).sum(),
        score: mean_of(|row| row.score.unwrap_or_default()),
        score_low: None,
        score_high: None,
        strict_score: tasks.iter().map(|row| row.strict_score).sum::<Option<f64>>().map(|sum| sum / tasks.len() as f64),
        density: mean_of(|row| row.density).unwrap_or_default(),
        prefill_seconds: median(tasks.iter().map(|row| row.prefill_seconds).collect()),
        changed_by_chunks: tasks.iter().map(|row| row.changed_by_chunks).sum(),
        ..tasks[0].clone()
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The Wilson 95 % interval of a mean of `count` scores from 0 to 1. It assumes scores of 0 and 1. Scores between
/// these vary less, so the interval is rather too wide than too narrow.
fn wilson(mean: f64, count: usize) -> (f64, f64) {
    // The quantile of the normal distribution for 95 %.
    const Z: f64 = 1.959_963_984_540_054;
    if count == 0 {
        return (0.0, 1.0);
    }
    let n = count as f64;
    let shrink = 1.0 + Z * Z / n;
    let centre = (mean + Z * Z / (2.0 * n)) / shrink;
    let half = Z / shrink * (mean * (1.0 - mean) / n + Z * Z / (4.0 * n * n)).sqrt();
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_of_textbooks() {
        for (mean, count, low, high) in
            [(1.0, 20, 0.8389, 1.0), (0.5, 10, 0.2366, 0.7634), (0.0, 5, 0.0, 0.4345), (0.5, 0, 0.0, 1.0)]
        {
            let (got_low, got_high) = wilson(mean, count);
            let off = (got_low - low).abs().max((got_high - high).abs());
            assert!(off < 1e-4, "{mean} of {count}: {got_low} {got_high}");
        }
    }
}
