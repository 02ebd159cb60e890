//! `methods-by-time`: time of each method's selection and attention, from the benchmark `methods`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::report::table;
use s2o_plot::{Bar, Bars};

use crate::record::{ATTENTION, Measurement, SELECTION, newest, of_device, shapes};
use crate::rows::{Sourced, distinct, missing};
use crate::section::Section;
use crate::text::{inline, share, three_digits, tokens};

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
    let wholes = rows.iter().filter(|row| row.is_whole());
    let timed = wholes.map(|row| timed(row, &rows)).collect::<Result<Vec<_>>>()?;
    let lengths = distinct(timed.iter().map(|timed| timed.tokens));
    let mut section = Section::new(directory);
    section.cite(rows.iter().copied());
    for length in lengths {
        let methods = timed.iter().filter(|timed| timed.tokens == length);
        let exact = baselines(length, &timed).into_iter().map(|(name, ms)| (name, [0.0, ms]));
        let bars = methods.map(|timed| (timed.method, [timed.selection, timed.attention])).chain(exact);
        phases(&mut section, "methods-by-time", length, bars)?;
    }
    section.text = format!(
        "Medians in milliseconds ({}); each part and the whole are medians of their own, the selection also as a share \
         of the whole and of the baseline.\n\n{}",
        inline(&shapes(&rows)),
        times(&timed)
    );
    Ok(section)
}

/// A row of a whole method together with the rows of its parts.
fn timed<'r>(whole: &'r Sourced<Measurement>, rows: &[&'r Sourced<Measurement>]) -> Result<Timed<'r>> {
    let Measurement { method, q_len, .. } = &whole.row;
    let part = |name: &str| {
        let part = format!("{method}{name}");
        let row = rows.iter().find(|row| row.method == part && row.q_len == *q_len);
        row.map(|row| row.ms)
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

/// Draws a bar for each method at a length, from its name and its milliseconds for selection and attention. The file is
/// named after `kind` and the length.
pub fn phases<'m>(
    section: &mut Section,
    kind: &str,
    length: usize,
    methods: impl IntoIterator<Item = (&'m str, [f64; 2])>,
) -> Result<()> {
    let bars: Vec<Bar> =
        methods.into_iter().map(|(label, parts)| Bar { label: label.to_owned(), parts: parts.to_vec() }).collect();
    let longest = bars.iter().map(|bar| bar.parts.iter().sum()).fold(0.0, f64::max);
    let height = 180 + 46 * u32::try_from(bars.len()).unwrap_or(u32::MAX).min(60);
    let plot = Bars {
        title: format!("{} tokens", tokens(length)),
        quantity: "milliseconds".to_owned(),
        parts: vec!["selection".to_owned(), "attention".to_owned()],
        bars,
        decimals: if longest < 10.0 { 2 } else { 1 },
    };
    let description = format!("Time for selection and attention of each method at {length} tokens");
    section.draw(format!("{kind}-{length}"), description, (1000, height), plot)
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
