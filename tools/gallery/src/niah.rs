//! `niah`: accuracy of a model by depth and length, from the outcomes of `evaluate run`.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use s2o_eval::Provenance;
use s2o_eval::report::{DepthGrid, RULER_AVERAGE, Row, depth_grids, rows, rows_of_models};
use s2o_eval::run::{Setting, read_outcomes};
use s2o_plot::{Heatmap, Matrix, Scale};

use crate::rows::{ascending, distinct, missing, read};
use crate::section::Section;
use crate::text::{inline, pivot, share, slug, tokens};

/// If the run has only table.csv, there are no depths and thus no picture.
pub fn section(directory: &Path) -> Result<Section> {
    let [outcomes, table, runs] = ["outcomes.jsonl", "table.csv", "runs.csv"].map(|name| directory.join(name));
    let (path, rows, grids) = if outcomes.exists() {
        let outcomes_there = read_outcomes(&outcomes)?;
        (outcomes, rows(&outcomes_there), depth_grids(&outcomes_there))
    } else if table.exists() {
        let columns = "task, context_tokens, method, chunk, items, score, density, model";
        let rows = read::<Row>(&table, columns)?.into_iter().map(|row| row.row).collect();
        (table, rows, Vec::new())
    } else {
        bail!(missing(directory, "outcomes.jsonl or table.csv of `evaluate run`", "neither"));
    };
    let is_any_shown = rows.iter().any(is_shown);
    ensure!(is_any_shown, missing(&path, "outcomes with a score", &format!("none among {}", rows.len())));
    let mut section = Section::new(directory);
    // Outcomes have no provenance.
    section.files.push(path);
    if runs.exists() {
        section.cite(&read::<Provenance>(&runs, "date, commit, device, source, command")?);
    }
    let grids: Vec<DepthGrid> = grids.into_iter().filter(|grid| grid.depths.len() > 1).collect();
    for grid in &grids {
        draw(&mut section, grid, &grids)?;
    }
    section.text = scores(&rows);
    Ok(section)
}

fn is_shown(row: &Row) -> bool {
    row.group.is_empty() && row.score.is_some()
}

fn scores(rows: &[Row]) -> String {
    let mut text = String::new();
    for model in rows_of_models(rows) {
        let first = model[0];
        let shown: Vec<&Row> = model.into_iter().filter(|row| is_shown(row)).collect();
        if shown.is_empty() {
            continue;
        }
        let chunks = distinct(shown.iter().map(|row| row.chunk.as_str())).join(", ");
        let setting = [first.model.as_str(), &first.dtype, &first.device].map(inline).join(", ");
        let (template, chunks) = (inline(&first.template), inline(&chunks));
        text.push_str(&format!("{setting}, chat template {template}, chunk {chunks}.\n\n"));
        let tasks = distinct(shown.iter().map(|row| row.task.as_str()));
        // The mean over the tasks stands for them.
        let whole = tasks.iter().find(|task| **task == RULER_AVERAGE).or(tasks.first());
        let means: Vec<&Row> = shown.iter().copied().filter(|row| Some(&row.task.as_str()) == whole).collect();
        let mut densities = distinct(shown.iter().map(|row| target(row)));
        // The methods' own settings, without a density, come first.
        let value = |density: &str| density.parse().unwrap_or(0.0);
        densities.sort_by(|a, b| f64::total_cmp(&value(a), &value(b)));
        for density in densities {
            let means: Vec<&Row> = means.iter().copied().filter(|row| target(row) == density).collect();
            let at = if density.is_empty() { String::new() } else { format!(" at density {density}") };
            text.push_str(&format!(
                "Mean score, in percent of the references that the answer contains{at}:\n\n{}\n",
                by_length(&means, score)
            ));
            if !density.is_empty() {
                continue;
            }
            if means.iter().any(|row| row.strict_score.is_some()) {
                let table = by_length(&means, |row| row.strict_score.map(percent));
                text.push_str(&format!("The same with 0 for answers that do not begin right:\n\n{table}\n"));
            }
            let table = by_length(&means, |row| Some(share(row.density, 3)));
            text.push_str(&format!("Density:\n\n{table}\n"));
        }
        // Methods differ most at the longest prompts; table.csv has the others.
        if let (Some(&length), true) = (ascending(shown.iter().map(|row| row.context_tokens)).last(), tasks.len() > 1) {
            let is_own = |row: &&Row| target(row).is_empty() && row.context_tokens == length;
            let own: Vec<&Row> = shown.into_iter().filter(is_own).collect();
            let items = ascending(own.iter().filter(|row| row.task != RULER_AVERAGE).map(|row| row.items));
            let items = items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            let table = by_task(&own);
            text.push_str(&format!("By task, {length} tokens, {items} items a task:\n\n{table}\n"));
        }
    }
    text
}

/// The density that the method was set to, as text; empty for its own settings.
fn target(row: &Row) -> &str {
    row.method.split_once('@').map_or("", |(_, density)| density)
}

fn method(row: &Row) -> &str {
    row.method.split_once('@').map_or(row.method.as_str(), |(method, _)| method)
}

fn score(row: &Row) -> Option<String> {
    row.score.map(percent)
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// Methods as rows, lengths as columns.
fn by_length(rows: &[&Row], cell: impl Fn(&Row) -> Option<String>) -> String {
    let lengths = ascending(rows.iter().map(|row| row.context_tokens));
    let columns: Vec<_> = lengths.into_iter().map(|length| (tokens(length), length)).collect();
    pivot(&["method"], &columns, lines(rows), |(name, chunk), length| {
        let row =
            rows.iter().find(|row| (method(row), row.chunk.as_str(), row.context_tokens) == (name, chunk, *length));
        row.and_then(|row| cell(row))
    })
}

/// Methods as rows, tasks as columns.
fn by_task(rows: &[&Row]) -> String {
    let tasks = distinct(rows.iter().map(|row| row.task.as_str()));
    let columns: Vec<_> = tasks.into_iter().map(|task| (inline(task), task)).collect();
    pivot(&["method"], &columns, lines(rows), |(name, chunk), task| {
        let row = rows.iter().find(|row| (method(row), row.chunk.as_str(), row.task.as_str()) == (name, chunk, *task));
        row.and_then(|row| score(row))
    })
}

/// Methods with their chunk size, which is named if there are several.
fn lines<'r>(rows: &[&'r Row]) -> Vec<(Vec<String>, (&'r str, &'r str))> {
    let are_several = rows.iter().any(|row| row.chunk != rows[0].chunk);
    let name = |(method, chunk): (&str, &str)| match are_several {
        true => format!("{}, chunk {}", inline(method), inline(chunk)),
        false => inline(method),
    };
    let keys = distinct(rows.iter().copied().map(|row| (method(row), row.chunk.as_str())));
    keys.into_iter().map(|key| (vec![name(key)], key)).collect()
}

/// Depths as rows, lengths as columns. The settings that distinguish a grid from the `others` are part of its name.
fn draw(section: &mut Section, grid: &DepthGrid, others: &[DepthGrid]) -> Result<()> {
    let names: [fn(&Setting) -> String; 5] = [
        |setting| setting.model.clone(),
        |setting| setting.dtype.clone(),
        |setting| setting.device.clone(),
        |setting| setting.template.to_string(),
        |setting| format!("chunk {}", setting.chunk),
    ];
    let varies = |name: &fn(&Setting) -> String| others.iter().any(|other| name(&other.setting) != name(&grid.setting));
    let mut title = format!("{}: {}", grid.task, grid.method);
    for name in names.iter().filter(|name| varies(name)) {
        title.push_str(&format!(", {}", name(&grid.setting)));
    }
    let values = grid.scores.iter().flatten().map(|score| score.map_or(f64::NAN, |score| 100.0 * score));
    let map = Heatmap {
        title: title.clone(),
        values: Matrix::new(grid.depths.len(), grid.lengths.len(), values.collect())?,
        row_labels: grid.depths.iter().map(|depth| format!("{:.0} %", 100.0 * depth)).collect(),
        column_labels: grid.lengths.iter().map(|&length| tokens(length)).collect(),
        rows: "depth".to_owned(),
        columns: "tokens".to_owned(),
        unit: "accuracy in percent".to_owned(),
        scale: Scale::Linear,
        range: Some((0.0, 100.0)),
        decimals: 0,
    };
    let description = format!("Accuracy by depth and length: {title}");
    section.draw(slug(&format!("depth {title}")), description, (800, 600), map)
}
