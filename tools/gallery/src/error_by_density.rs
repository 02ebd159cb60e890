//! `error-by-density`: the errors of all methods at the same densities, from the experiment `matched-density`.

use std::path::Path;

use anyhow::{Result, bail};
use s2o_eval::experiment::matched_density::{MatchedRow, SweepRow, at_densities};
use s2o_plot::{Axis, Lines, Series};

use crate::rows::{Sourced, ascending, distinct, missing, newest_runs, read};
use crate::section::Section;
use crate::text::{error, pivot, share, with_unit};

/// Densities to compare at if there is only a sweep.
const DENSITIES: [f64; 9] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];

pub fn section(directory: &Path) -> Result<Section> {
    let [matched, sweep] = ["matched-density.csv", "sweep.csv"].map(|name| directory.join(name));
    let mut section = Section::new(directory);
    let rows: Vec<MatchedRow> = if matched.exists() {
        let rows = newest_runs(read::<MatchedRow>(&matched, "method, density, layers, mse, mae, rel_l1")?, |row| {
            row.method.clone()
        });
        section.cite(&rows);
        rows.into_iter().map(|row| row.row).collect()
    } else if sweep.exists() {
        let rows = newest_runs(read::<SweepRow>(&sweep, "method, value, layer, density, mse, rel_l1")?, |row| {
            row.method.clone()
        });
        section.cite(&rows);
        let rows: Vec<SweepRow> = rows.into_iter().map(|Sourced { row, .. }| row).collect();
        at_densities(&rows, &DENSITIES)
    } else {
        let expected = "matched-density.csv or sweep.csv of `evaluate experiment matched-density`";
        bail!(missing(directory, expected, "neither"));
    };
    let methods = distinct(rows.iter().map(|row| row.method.as_str()));
    let densities = ascending(rows.iter().map(|row| row.density));
    // The last row of a method at a density: a run may have been repeated.
    let cell =
        |method: &str, density: f64| rows.iter().rev().find(|row| row.method == method && row.density == density);

    let point =
        |method: &str, density: f64| (density, cell(method, density).and_then(|row| row.mse).unwrap_or(f64::NAN));
    let series = methods.iter().map(|method| Series {
        label: (*method).to_owned(),
        points: densities.iter().map(|&density| point(method, density)).collect(),
        marks: true,
    });
    let plot = Lines {
        x: Axis::linear("density"),
        y: Axis::log10("mean squared error"),
        series: series.collect(),
        ..Lines::default()
    };
    let description = "Mean squared error by density, one line for each method".to_owned();
    section.draw("error-by-density".to_owned(), description, (900, 600), plot)?;

    let lines = methods.iter().map(|method| (vec![(*method).to_owned()], *method));
    let errors = pivot(&["method"], &with_unit("density", &densities), lines, |method, &density| {
        let text = |of: fn(&MatchedRow) -> Option<f64>, format: fn(f64) -> String| {
            let own = of(cell(method, density)?)?;
            let all = methods.iter().filter_map(|method| of(cell(method, density)?));
            let is_lowest = all.min_by(f64::total_cmp) == Some(own);
            Some(if is_lowest { format!("**{}**", format(own)) } else { format(own) })
        };
        Some(format!("{}, {}", text(|row| row.mse, error)?, text(|row| row.rel_l1, |value| share(value, 4))?))
    });
    section.text = format!(
        "Mean squared error and, behind it, relative L1 error; the lowest at each density is bold.\n\n{errors}"
    );
    Ok(section)
}
