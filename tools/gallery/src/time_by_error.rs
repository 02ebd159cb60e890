//! `time-by-error`: time of each method at equal error, from the benchmark `methods` with `--sweep`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::metrics::FallingCurve;
use s2o_plot::{Axis, Lines, Series};

use crate::record::{Measurement, newest, of_device, shapes};
use crate::rows::{Sourced, ascending, distinct};
use crate::section::Section;
use crate::text::{inline, pivot, three_digits, tokens, with_unit};

const ERRORS: [f64; 4] = [0.02, 0.05, 0.1, 0.15];

pub fn section(directory: &Path) -> Result<Section> {
    let rows = of_device(directory)?;
    let picks = |row: &Measurement| row.bench == "methods sweep" && row.is_whole();
    let rows = newest(directory, &rows, "rows of the bench `methods` with `--sweep`", picks)?;
    let mut section = Section::new(directory);
    section.cite(rows.iter().copied());
    for length in ascending(rows.iter().map(|row| row.q_len)) {
        let of_length: Vec<_> = rows.iter().copied().filter(|row| row.q_len == length).collect();
        let plot = Lines {
            title: format!("{} tokens", tokens(length)),
            x: Axis::log10("relative L2 error"),
            y: Axis::log10("milliseconds"),
            series: methods(&of_length).into_iter().map(|method| series(&of_length, method)).collect(),
            ..Lines::default()
        };
        let description = format!("Time by error of each method at {length} tokens");
        section.draw(format!("time-by-error-{length}"), description, (900, 600), plot)?;
    }
    section.text = format!(
        "Times as fast as the exact baseline at equal relative L2 error ({}), interpolated between the settings \
         of a method. First the error of all heads together, then the mean of the heads' errors.\n\n{}\n{}",
        inline(&shapes(&rows)),
        speed_ups(&rows, |row| row.error),
        speed_ups(&rows, |row| row.error_by_head)
    );
    Ok(section)
}

/// A method without the value of its swept option, which comes last.
fn method(row: &Measurement) -> &str {
    row.method.rsplit_once(':').map_or(&row.method, |(method, _)| method)
}

fn methods<'r>(rows: &[&'r Sourced<Measurement>]) -> Vec<&'r str> {
    distinct(rows.iter().map(|row| method(row)))
}

fn series(rows: &[&Sourced<Measurement>], name: &str) -> Series {
    let own = rows.iter().filter(|row| method(row) == name);
    let mut points: Vec<(f64, f64)> = own.filter_map(|row| Some((row.error?, row.ms))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Series { label: name.to_owned(), points, marks: true }
}

/// A line for each length and method, a column for each error.
fn speed_ups(rows: &[&Sourced<Measurement>], error: fn(&Measurement) -> Option<f64>) -> String {
    let mut lines = Vec::new();
    for length in ascending(rows.iter().map(|row| row.q_len)) {
        let of_length: Vec<_> = rows.iter().copied().filter(|row| row.q_len == length).collect();
        for name in methods(&of_length) {
            let own = of_length.iter().filter(|row| method(row) == name);
            // Time in units of the baseline's.
            let points = own.filter_map(|row| Some((error(row)?, row.ratio?.recip())));
            lines.push((vec![tokens(length), name.to_owned()], FallingCurve::new(points)));
        }
    }
    pivot(&["tokens", "method"], &with_unit("error", &ERRORS), lines, |curve, &error| {
        Some(three_digits(curve.at(error)?.recip()))
    })
}
