//! The tables as Markdown, with methods side by side.

use std::fmt::Write;

use super::aggregate::{RULER_AVERAGE, Row, grouped, rows, unpaired};
use super::columns::{ACCURACY, CHANGED, DENSITY, passage_columns};
use super::depth_grid::{DepthGrid, depth_grids};
use super::text::table;
use crate::run::Outcome;

/// All tables of `outcomes`: means over tasks by length, accuracy and density by task and length (their intervals are
/// only in the CSV file), groups, changes by chunk size, perplexity, and depth by length if every cell was run.
pub fn markdown(outcomes: &[Outcome]) -> String {
    let rows = rows(outcomes);
    let mut text = String::new();
    for models_rows in rows_of_models(&rows) {
        let Row { model, dtype, device, template, .. } = models_rows[0];
        heading(&mut text, 2, &format!("{model}, {dtype}, {device}, chat template {template}"));
        by_length(&mut text, &models_rows);
        tables(&mut text, &models_rows);
    }
    if let Some(left_out) = unpaired(outcomes) {
        heading(&mut text, 2, "Left out");
        text.push_str(&(left_out + "\n"));
    }
    depth_tables(&mut text, outcomes);
    text
}

/// The tables of [`markdown`] for each task and length of one model, without the means over tasks, below headings of
/// the third level.
pub fn task_tables(outcomes: &[Outcome]) -> String {
    let rows = rows(outcomes);
    let mut text = String::new();
    tables(&mut text, &rows.iter().collect::<Vec<_>>());
    depth_tables(&mut text, outcomes);
    text
}

/// Accuracy, density, groups, chunk sizes and perplexity of one model.
fn tables(text: &mut String, rows: &[&Row]) {
    let (answers, passages): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.score.is_some());
    let (tasks, groups): (Vec<&Row>, Vec<&Row>) = answers.into_iter().partition(|row| row.group.is_empty());
    pivot(text, "Accuracy in percent", &tasks, ACCURACY.cell);
    pivot(text, "Density", &tasks, DENSITY.cell);
    pivot(text, "Accuracy in percent by group", &groups, ACCURACY.cell);
    let changed: Vec<&Row> = tasks.into_iter().filter(|row| row.changed_by_chunks.is_some()).collect();
    pivot(text, "Answers that differ from those with the first chunk size", &changed, CHANGED.cell);
    perplexity(text, &passages);
}

fn depth_tables(text: &mut String, outcomes: &[Outcome]) {
    let is_shown = |grid: &&DepthGrid| grid.is_full() && grid.depths.len() > 1 && grid.lengths.len() > 1;
    depth_grids(outcomes).iter().filter(is_shown).for_each(|grid| depth_table(text, grid));
}

/// The rows, split by model, precision, device and chat template.
pub fn rows_of_models(rows: &[Row]) -> Vec<Vec<&Row>> {
    grouped(rows, |row| [&row.model, &row.dtype, &row.device, &row.template])
}

fn pivot(text: &mut String, title: &str, rows: &[&Row], cell: impl Fn(&Row) -> String) {
    if !rows.is_empty() {
        heading(text, 3, title);
        text.push_str(&pivot_table(rows, cell));
    }
}

/// Task, group and length as rows, methods and chunks as columns. `rows` must not be empty.
fn pivot_table(rows: &[&Row], cell: impl Fn(&Row) -> String) -> String {
    let columns = variants(rows);
    let has_groups = rows.iter().any(|row| !row.group.is_empty());
    let mut header = vec!["task".to_owned()];
    header.extend(has_groups.then(|| "group".to_owned()));
    header.extend(["context".to_owned(), "items".to_owned()]);
    header.extend(columns.iter().map(|column| column.label.clone()));
    let places = grouped(rows.iter().copied(), |row| (&row.task, &row.group, row.context_tokens));
    let lines = places.into_iter().map(|own| {
        let mut line = vec![own[0].task.clone()];
        line.extend(has_groups.then(|| own[0].group.clone()));
        // All methods have the same samples.
        line.extend([own[0].context_tokens.to_string(), own[0].items.to_string()]);
        let of_column = |column: &Variant| own.iter().rev().find(|row| column.has(row)).map(|row| cell(row));
        line.extend(columns.iter().map(|column| of_column(column).unwrap_or_default()));
        line
    });
    table(&header, lines)
}

/// Methods as rows, lengths as columns: accuracy and density, with the same weight for each task.
fn by_length(text: &mut String, rows: &[&Row]) {
    let is_meant = |row: &&Row| row.score.is_some() && row.group.is_empty() && row.task != RULER_AVERAGE;
    let rows: Vec<&Row> = rows.iter().copied().filter(is_meant).collect();
    let mut lengths: Vec<usize> = rows.iter().map(|row| row.context_tokens).collect();
    lengths.sort_unstable();
    lengths.dedup();
    if rows.iter().all(|row| row.task == rows[0].task) {
        return;
    }
    let header = header_of("method", &lengths);
    let lines = variants(&rows).into_iter().map(|column| {
        let mut line = vec![column.label.clone()];
        line.extend(lengths.iter().map(|&length| {
            let tasks: Vec<&&Row> = rows.iter().filter(|row| column.has(row) && row.context_tokens == length).collect();
            let mean = |value: fn(&Row) -> f64| tasks.iter().map(|row| value(row)).sum::<f64>() / tasks.len() as f64;
            if tasks.is_empty() {
                return String::new();
            }
            let accuracy = 100.0 * mean(|row| row.score.unwrap_or_default());
            let strict = 100.0 * mean(|row| row.strict_score.unwrap_or_default());
            format!("{accuracy:.1} / {strict:.1} / {:.3}", mean(|row| row.density))
        }));
        line
    });
    heading(text, 3, "Accuracy in percent / strictly / density by length, means over tasks");
    text.push_str(&table(&header, lines));
}

fn perplexity(text: &mut String, rows: &[&Row]) {
    if rows.is_empty() {
        return;
    }
    let columns = passage_columns();
    let header: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let lines = rows.iter().map(|row| columns.iter().map(|column| (column.cell)(row)).collect());
    heading(text, 3, "Perplexity");
    text.push_str(&table(&header, lines));
}

fn depth_table(text: &mut String, grid: &DepthGrid) {
    let DepthGrid { task, method, setting, lengths, depths, scores } = grid;
    heading(text, 3, &format!("{task} by depth and length: {method}, chunk {}, {}", setting.chunk, setting.model));
    let header = header_of("depth", lengths);
    let lines = depths.iter().zip(scores).map(|(depth, scores)| {
        let percent = |score: &Option<f64>| score.map(|score| format!("{:.0}", 100.0 * score)).unwrap_or_default();
        [format!("{:.0} %", 100.0 * depth)].into_iter().chain(scores.iter().map(percent)).collect()
    });
    text.push_str(&table(&header, lines));
}

fn header_of(first: &str, lengths: &[usize]) -> Vec<String> {
    [first.to_owned()].into_iter().chain(lengths.iter().map(ToString::to_string)).collect()
}

/// A method with a chunk size, which is named if there are several sizes.
struct Variant {
    method: String,
    chunk: String,
    label: String,
}

impl Variant {
    fn has(&self, row: &Row) -> bool {
        (&row.method, &row.chunk) == (&self.method, &self.chunk)
    }
}

fn variants(rows: &[&Row]) -> Vec<Variant> {
    let are_several = rows.iter().any(|row| row.chunk != rows[0].chunk);
    let own = grouped(rows.iter().copied(), |row| (&row.method, &row.chunk));
    let variant = |own: &Vec<&Row>| {
        let Row { method, chunk, .. } = own[0];
        let label = if are_several { format!("{method}, chunk {chunk}") } else { method.clone() };
        Variant { method: method.clone(), chunk: chunk.clone(), label }
    };
    own.iter().map(variant).collect()
}

fn heading(text: &mut String, level: usize, title: &str) {
    let gap = if text.is_empty() || text.ends_with("\n\n") { "" } else { "\n" };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{gap}{} {title}\n", "#".repeat(level));
}
