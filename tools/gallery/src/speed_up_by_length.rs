//! `speed-up-by-length`: attention and whole prefills compared with other implementations, from the benchmarks
//! `attention` and `prefill`.

use std::path::Path;

use anyhow::Result;
use s2o_plot::{Axis, Level, Lines, Series};

use crate::record::{Measurement, newest, of_device, shapes};
use crate::rows::{Sourced, ascending, distinct};
use crate::section::{Picture, Section, Sources};
use crate::text::{inline, pivot, share, three_digits, tokens};

/// Baseline of attention alone.
const FLASH_ATTENTION: &str = "candle-flash-attn 0.11.1";
/// Baseline of prefills: Candle's own model with that attention.
const STOCK: &str = "stock, candle-flash-attn 0.11.1";

/// A benchmark of methods against a baseline.
struct Comparison {
    bench: &'static str,
    baseline: &'static str,
    /// Prefix of the rows' method, and name of the method. The longest matching prefix decides.
    names: [(&'static str, &'static str); 3],
    /// What the methods ran on.
    on: &'static str,
    /// Name of the picture.
    picture: &'static str,
    description: fn() -> String,
    /// The vertical axis.
    axis: fn() -> String,
    /// What the table shows, from the shapes of the rows.
    intro: fn(&str) -> String,
}

const COMPARISONS: [Comparison; 2] = [
    Comparison {
        bench: "attention gpu",
        baseline: FLASH_ATTENTION,
        names: [("dense, ", "dense"), ("default, ", "S2O"), ("paper, ", "S2O paper")],
        on: "tensors",
        picture: "speed-up-by-length",
        description: || format!("Speed-up of attention over {FLASH_ATTENTION} by prompt length"),
        axis: || format!("times as fast as {FLASH_ATTENTION}"),
        intro: |shapes| {
            format!(
                "Attention alone, times as fast as {FLASH_ATTENTION} ({shapes}). Brackets hold the density and the \
                 relative L2 distance from exact attention; \"S2O paper\" has the paper's settings."
            )
        },
    },
    Comparison {
        bench: "prefill",
        baseline: STOCK,
        names: [("dense, ", "dense"), ("s2o, ", "S2O"), ("s2o, paper's preset, ", "S2O paper")],
        on: "model",
        picture: "time-to-first-token-by-length",
        description: || "Time to first token of Candle's model over that of ours, by prompt length".to_owned(),
        axis: || "first token, times as fast as stock".to_owned(),
        intro: |shapes| {
            format!(
                "Time to first token, times as fast as candle-transformers with {FLASH_ATTENTION} (\"stock\"; \
                 {shapes}). The error is that of the logits:"
            )
        },
    },
];

/// One method on one kind of tensors or weights.
struct Curve<'r> {
    method: &'static str,
    /// The tensors or weights, as the rows name them.
    on: &'r str,
    rows: Vec<&'r Sourced<Measurement>>,
}

pub fn section(directory: &Path) -> Result<Section> {
    let rows = of_device(directory)?;
    let (mut texts, mut pictures, mut sources) = (Vec::new(), Vec::new(), Sources::default());
    for Comparison { bench, baseline, names, on, picture, description, axis, intro } in &COMPARISONS {
        let picks =
            |row: &Measurement| row.bench == *bench && row.baseline == *baseline && named(names, &row.method).is_some();
        // Not every device has timed whole prefills.
        if !texts.is_empty() && !rows.iter().any(|row| picks(row)) {
            continue;
        }
        let rows = newest(directory, &rows, &format!("rows of the bench `{bench}` against {baseline}"), picks)?;
        sources = sources.and(Sources::of(rows.iter().copied()));
        let curves = curves(&rows, names);
        pictures.push(Picture::new((*picture).to_owned(), description(), (900, 600), lines(&curves, &axis()))?);
        texts.push(format!("{}\n\n{}", intro(&inline(&shapes(&rows))), speed_ups(&curves, on)));
    }
    Ok(Section { directory: directory.to_owned(), pictures, text: texts.join("\n"), sources })
}

/// The name of a method, and the tensors or weights that it ran on.
fn named<'r>(names: &[(&str, &'static str)], method: &'r str) -> Option<(&'static str, &'r str)> {
    let fitting = names.iter().filter_map(|(prefix, name)| Some((*name, method.strip_prefix(prefix)?)));
    fitting.min_by_key(|(_, on)| on.len())
}

fn curves<'r>(rows: &[&'r Sourced<Measurement>], names: &[(&str, &'static str)]) -> Vec<Curve<'r>> {
    let name = |row: &&'r Sourced<Measurement>| named(names, &row.method);
    let ons = distinct(rows.iter().filter_map(name).map(|(_, on)| on));
    let of = |method: &'static str, on: &'r str| {
        let rows: Vec<_> = rows.iter().copied().filter(|row| name(row) == Some((method, on))).collect();
        (!rows.is_empty()).then_some(Curve { method, on, rows })
    };
    ons.into_iter().flat_map(|on| names.iter().filter_map(move |(_, method)| of(method, on))).collect()
}

impl Curve<'_> {
    /// A label short enough for a legend: `needle-7m` for `needle-7m layers`, `calibrated` for `llama-3.1-8b 32 layers
    /// calibrated weights`.
    fn label(&self) -> String {
        let words: Vec<&str> = self.on.split_whitespace().collect();
        let on = match words.as_slice() {
            [.., on, "layers" | "weights"] => on,
            _ => self.on,
        };
        format!("{}, {on}", self.method)
    }
}

fn lines(curves: &[Curve], y: &str) -> Lines {
    let point = |row: &&Sourced<Measurement>| (row.q_len as f64, row.ratio.unwrap_or(f64::NAN));
    // A single length would be a point that other points often hide; the table has it.
    let has_line = |curve: &&Curve| curve.rows.len() > 1 || curves.iter().all(|other| other.rows.len() == 1);
    let series = curves.iter().filter(has_line).map(|curve| Series {
        label: curve.label(),
        points: curve.rows.iter().map(point).collect(),
        marks: true,
    });
    Lines {
        x: Axis::log2("prompt length in tokens"),
        y: Axis::log2(y),
        series: series.collect(),
        levels: vec![Level { label: "as fast".to_owned(), y: 1.0 }],
        ..Lines::default()
    }
}

fn speed_ups(curves: &[Curve], on: &str) -> String {
    let lengths = ascending(curves.iter().flat_map(|curve| &curve.rows).map(|row| row.q_len));
    let columns: Vec<_> = lengths.into_iter().map(|length| (tokens(length), length)).collect();
    let lines = curves.iter().map(|curve| (vec![curve.method.to_owned(), curve.on.to_owned()], curve));
    pivot(&["method", on], &columns, lines, |curve, length| {
        let row = curve.rows.iter().find(|row| row.q_len == *length)?;
        let ratio = three_digits(row.ratio?);
        let density = row.density.filter(|density| *density < 0.9995).map(|density| share(density, 3));
        let error = row.error.map(|error| format!("error {}", share(error, 3)));
        let both: Vec<String> = density.into_iter().chain(error).collect();
        Some(if both.is_empty() { ratio } else { format!("{ratio} ({})", both.join(", ")) })
    })
}
