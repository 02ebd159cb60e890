//! `speed-up-by-length`: attention and whole prefills compared with other implementations, from the benchmarks
//! `attention` and `prefill`.

use std::path::Path;

use anyhow::Result;
use s2o_plot::{Axis, Level, Lines, Series};

use crate::record::{Measurement, newest, of_device, shapes};
use crate::rows::{Sourced, ascending, distinct};
use crate::section::Section;
use crate::text::{inline, pivot, share, three_digits, tokens};

/// Baseline of attention alone.
const FLASH_ATTENTION: &str = "candle-flash-attn 0.11.1";
/// Baseline of prefills: Candle's own model with that attention.
const STOCK: &str = "stock, candle-flash-attn 0.11.1";

/// Prefix of the rows' method, and name of the method. The longest matching prefix decides.
const ATTENTION: [(&str, &str); 3] = [("dense, ", "dense"), ("default, ", "S2O"), ("paper, ", "S2O paper")];
const PREFILL: [(&str, &str); 7] = [
    ("dense, ", "dense"),
    ("s2o, ", "S2O"),
    ("s2o, paper's preset, ", "S2O paper"),
    ("dense, linear layers in int8, ", "dense int8"),
    ("s2o, linear layers in int8, ", "S2O int8"),
    // An option that int8 has replaced.
    ("dense, linear layers in fp8, ", "dense fp8"),
    ("s2o, linear layers in fp8, ", "S2O fp8"),
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
    let is_of = |bench: &'static str, baseline: &'static str, names: &'static [(&str, &str)]| {
        move |row: &Measurement| row.bench == bench && row.baseline == baseline && named(names, &row.method).is_some()
    };
    let expected = format!("rows of the bench `attention gpu` against {FLASH_ATTENTION}");
    let attention = newest(directory, &rows, &expected, is_of("attention gpu", FLASH_ATTENTION, &ATTENTION))?;
    let mut section = Section::new(directory);
    section.cite(attention.iter().copied());
    let curves = curves(&attention, &ATTENTION);
    let description = format!("Speed-up of attention over {FLASH_ATTENTION} by prompt length");
    let plot = lines(&curves, &format!("times as fast as {FLASH_ATTENTION}"));
    section.draw("speed-up-by-length".to_owned(), description, (900, 600), plot)?;
    section.text = format!(
        "Attention alone, times as fast as {FLASH_ATTENTION} ({}). Brackets hold the density and the relative L2 \
         distance from exact attention; \"S2O paper\" has the paper's settings.\n\n{}",
        inline(&shapes(&attention)),
        speed_ups(&curves, "tensors")
    );

    // Not every device has timed whole prefills.
    let picks = is_of("prefill", STOCK, &PREFILL);
    if rows.iter().any(|row| picks(row)) {
        let prefill = newest(directory, &rows, "rows of the bench `prefill`", picks)?;
        section.cite(prefill.iter().copied());
        let curves = self::curves(&prefill, &PREFILL);
        let description = "Time to first token of Candle's model over that of ours, by prompt length".to_owned();
        let plot = lines(&curves, "first token, times as fast as stock");
        section.draw("time-to-first-token-by-length".to_owned(), description, (900, 600), plot)?;
        section.text.push_str(&format!(
            "\nTime to first token, times as fast as candle-transformers with {FLASH_ATTENTION} (\"stock\"; {}). The \
             error is that of the logits:\n\n{}",
            inline(&shapes(&prefill)),
            speed_ups(&curves, "model")
        ));
    }
    Ok(section)
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
