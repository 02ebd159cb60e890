//! `methods-by-time`: time of each method's selection and attention, from the benchmark `methods`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::report::table;

use crate::phases;
use crate::record::{Measurement, newest, of_device, shapes};
use crate::rows::{Sourced, distinct, missing};
use crate::section::{Picture, Section, Sources};
use crate::text::{inline, share, three_digits, tokens};

const SELECTION: &str = ", selection";
const ATTENTION: &str = ", attention";

/// A method at a length.
struct Timed<'r> {
    method: &'r str,
    tokens: usize,
    /// Milliseconds.
    selection: f64,
    attention: f64,
    /// Selection and attention, timed together.
    whole: &'r Measurement,
}

pub fn section(directory: &Path) -> Result<Section> {
    let rows = of_device(directory)?;
    let rows = newest(directory, &rows, "rows of the bench `methods`", |row| row.bench == "methods")?;
    let wholes = rows.iter().filter(|row| ![SELECTION, ATTENTION].iter().any(|part| row.row.method.ends_with(part)));
    let timed = wholes.map(|row| timed(row, &rows)).collect::<Result<Vec<_>>>()?;
    let lengths = distinct(timed.iter().map(|timed| timed.tokens));
    let pictures = lengths.iter().map(|&length| picture(length, &timed)).collect::<Result<_>>()?;
    let text = format!(
        "Medians in milliseconds ({}); each part and the whole are medians of their own, the selection also as a share \
         of the whole and of the baseline.\n\n{}",
        inline(&shapes(&rows)),
        times(&timed)
    );
    let sources = Sources::of(rows.iter().copied());
    Ok(Section { directory: directory.to_owned(), pictures, text, sources })
}

/// A row of a whole method together with the rows of its parts.
fn timed<'r>(whole: &'r Sourced<Measurement>, rows: &[&'r Sourced<Measurement>]) -> Result<Timed<'r>> {
    let Measurement { method, q_len, .. } = &whole.row;
    let part = |name: &str| {
        let part = format!("{method}{name}");
        let row = rows.iter().find(|row| row.row.method == part && row.row.q_len == *q_len);
        row.map(|row| row.row.ms)
            .ok_or_else(|| missing(&whole.path, &format!("a row `{part}` at {q_len} tokens beside `{method}`"), "none"))
    };
    let [selection, attention] = [part(SELECTION)?, part(ATTENTION)?];
    Ok(Timed { method, tokens: *q_len, selection, attention, whole: &whole.row })
}

/// The baselines of a length, each with its time in milliseconds.
fn baselines<'t>(length: usize, timed: &'t [Timed]) -> Vec<(&'t str, f64)> {
    let own = timed.iter().filter(|timed| timed.tokens == length);
    let mut baselines: Vec<(&str, f64)> = Vec::new();
    for (name, ms) in own.filter_map(|timed| Some((timed.whole.baseline.as_str(), timed.whole.baseline_ms?))) {
        // Runs of other days have other times for a baseline; one of them is enough.
        if !baselines.iter().any(|there| there.0 == name) {
            baselines.push((name, ms));
        }
    }
    baselines
}

fn picture(length: usize, timed: &[Timed]) -> Result<Picture> {
    let methods = timed.iter().filter(|timed| timed.tokens == length);
    let exact = baselines(length, timed).into_iter().map(|(name, ms)| (name, [0.0, ms]));
    let bars = methods.map(|timed| (timed.method, [timed.selection, timed.attention])).chain(exact);
    phases::picture("methods-by-time", length, bars)
}

fn times(timed: &[Timed]) -> String {
    let header = [
        "tokens",
        "method",
        "selection",
        "of whole",
        "of baseline",
        "attention",
        "whole",
        "density",
        "error",
        "x baseline",
    ];
    let percent = |part: f64, of: f64| format!("{} %", three_digits(100.0 * part / of));
    let mut lines = Vec::new();
    for length in distinct(timed.iter().map(|timed| timed.tokens)) {
        for own in timed.iter().filter(|timed| timed.tokens == length) {
            let Timed { method, selection, attention, whole, .. } = own;
            lines.push(vec![
                tokens(length),
                (*method).to_owned(),
                three_digits(*selection),
                percent(*selection, whole.ms),
                whole.baseline_ms.map_or("-".to_owned(), |ms| percent(*selection, ms)),
                three_digits(*attention),
                three_digits(whole.ms),
                whole.density.map_or("-".to_owned(), |density| share(density, 3)),
                whole.error.map_or("-".to_owned(), |error| share(error, 3)),
                whole.ratio.map_or("-".to_owned(), three_digits),
            ]);
        }
        for (name, ms) in baselines(length, timed) {
            let cells = [&tokens(length), name, "-", "-", "-", "-", &three_digits(ms), "-", "-", "1"];
            lines.push(cells.map(str::to_owned).to_vec());
        }
    }
    table(&header, lines)
}
