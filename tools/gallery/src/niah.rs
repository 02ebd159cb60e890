//! `niah`: accuracy of a model by depth and length, from the outcomes of `evaluate run`.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use s2o_eval::Provenance;
use s2o_eval::report::{DepthGrid, Row, accuracy, depth_grids, pivot_table, rows, rows_of_models};
use s2o_eval::run::{Setting, read_outcomes};
use s2o_plot::{Heatmap, Matrix, Scale};

use crate::rows::{distinct, missing, read};
use crate::section::Section;
use crate::text::{inline, share, slug, tokens};

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
        text.push_str(&format!(
            "Accuracy in percent with its 95 % interval, and density: {setting}, chat template {}, chunk {}.\n\n",
            inline(&first.template),
            inline(&chunks)
        ));
        text.push_str(&pivot_table(&shown, |row| format!("{}, {}", accuracy(row), share(row.density, 3))));
        text.push('\n');
    }
    text
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
