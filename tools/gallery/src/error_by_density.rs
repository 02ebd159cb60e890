//! `error-by-density`: the errors of all methods at the same densities, from the experiment `matched-density`.

use std::path::Path;

use anyhow::{Result, bail};
use s2o_eval::experiment::matched_density::{MatchedRow, SweepRow, at_densities};
use s2o_eval::report::table;
use s2o_plot::{Axis, Lines, Series};

use crate::rows::{Sourced, distinct, missing, newest_runs, read};
use crate::section::{Picture, Section, Sources};
use crate::text::{error, share};

/// Densities to compare at if there is only a sweep.
const DENSITIES: [f64; 9] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];

pub fn section(directory: &Path) -> Result<Section> {
    let [matched, sweep] = ["matched-density.csv", "sweep.csv"].map(|name| directory.join(name));
    let (rows, sources) = if matched.exists() {
        let rows = read::<MatchedRow>(&matched, "method, density, layers, mse, mae, rel_l1")?;
        let rows = newest_runs(rows, |row| row.method.clone());
        let sources = Sources::of(&rows);
        (rows.into_iter().map(|row| row.row).collect(), sources)
    } else if sweep.exists() {
        let rows = newest_runs(read::<SweepRow>(&sweep, "method, value, layer, density, mse, rel_l1")?, |row| {
            row.method.clone()
        });
        let sources = Sources::of(&rows);
        let rows: Vec<SweepRow> = rows.into_iter().map(|Sourced { row, .. }| row).collect();
        (at_densities(&rows, &DENSITIES), sources)
    } else {
        let expected = "matched-density.csv or sweep.csv of `evaluate experiment matched-density`";
        bail!(missing(directory, expected, "neither"));
    };
    let description = "Mean squared error by density, one line for each method".to_owned();
    let picture = Picture::new("error-by-density".to_owned(), description, (900, 600), lines(&rows))?;
    let text = format!(
        "Mean squared error and, behind it, relative L1 error; the lowest at each density is bold.\n\n{}",
        errors(&rows)
    );
    Ok(Section { directory: directory.to_owned(), pictures: vec![picture], text, sources })
}

fn methods(rows: &[MatchedRow]) -> Vec<&str> {
    distinct(rows.iter().map(|row| row.method.as_str()))
}

fn densities(rows: &[MatchedRow]) -> Vec<f64> {
    let mut densities = distinct(rows.iter().map(|row| row.density));
    densities.sort_by(f64::total_cmp);
    densities
}

/// The last row of a method at a density: a run may have been repeated.
fn cell<'r>(rows: &'r [MatchedRow], method: &str, density: f64) -> Option<&'r MatchedRow> {
    rows.iter().rev().find(|row| row.method == method && row.density == density)
}

fn lines(rows: &[MatchedRow]) -> Lines {
    let densities = densities(rows);
    let point =
        |method: &str, density: f64| (density, cell(rows, method, density).and_then(|row| row.mse).unwrap_or(f64::NAN));
    let series = methods(rows).into_iter().map(|method| Series {
        label: method.to_owned(),
        points: densities.iter().map(|&density| point(method, density)).collect(),
        marks: true,
    });
    Lines {
        x: Axis::linear("density"),
        y: Axis::log10("mean squared error"),
        series: series.collect(),
        ..Lines::default()
    }
}

fn errors(rows: &[MatchedRow]) -> String {
    let (methods, densities) = (methods(rows), densities(rows));
    let lowest = |density: f64, error: fn(&MatchedRow) -> Option<f64>| {
        let errors = methods.iter().filter_map(|method| error(cell(rows, method, density)?));
        errors.min_by(f64::total_cmp)
    };
    let lowest: Vec<_> =
        densities.iter().map(|&density| (lowest(density, |row| row.mse), lowest(density, |row| row.rel_l1))).collect();
    let bold = |text: String, is_lowest: bool| if is_lowest { format!("**{text}**") } else { text };
    let line = |method: &&str| {
        let cells = densities.iter().zip(&lowest).map(|(&density, (mse, rel_l1))| {
            let row = cell(rows, method, density);
            match row.and_then(|row| Some((row.mse?, row.rel_l1?))) {
                Some((own_mse, own_l1)) => {
                    let [left, right] = [(error(own_mse), own_mse, mse), (share(own_l1, 4), own_l1, rel_l1)]
                        .map(|(text, own, lowest)| bold(text, Some(own) == *lowest));
                    format!("{left}, {right}")
                }
                None => "-".to_owned(),
            }
        });
        [(*method).to_owned()].into_iter().chain(cells).collect()
    };
    let mut header = vec!["method".to_owned()];
    header.extend(densities.iter().map(ToString::to_string));
    if let Some(first) = header.get_mut(1) {
        *first = format!("density {first}");
    }
    table(&header, methods.iter().map(line))
}
