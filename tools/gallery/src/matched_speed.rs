//! `matched-speed`: time of a method and of random blocks of the same density, from the experiment `matched-speed`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::matched_speed::SpeedRow;
use s2o_eval::method::{MethodSpec, find};
use s2o_eval::metrics::median;
use s2o_eval::report::table;
use s2o_plot::{Axis, Level, Lines, Series};

use crate::layers::{Length, Setting, by_length, layer_row, read};
use crate::section::{Picture, Section, Sources};
use crate::text::{inline, share, slug, three_digits, tokens};

const NAME: &str = "matched-speed";
const COLUMNS: &str = "method, value, layer, tokens, density, block_density, seconds, selection_seconds, \
                       block_seconds, dense_seconds, ratio";

layer_row!(SpeedRow, method, |row| match row.value {
    Some(value) => format!("`{}` with {} {value}", row.method, option(&row.method)),
    None => format!("`{}`", row.method),
});

/// Means of a setting over the layers.
struct Point {
    value: Option<f64>,
    density: f64,
    block_density: f64,
    /// Milliseconds, like all fields below.
    selection: f64,
    whole: f64,
    blocks: f64,
    dense: f64,
}

pub fn section(directory: &Path) -> Result<Section> {
    let rows = read::<SpeedRow>(directory, NAME, COLUMNS)?;
    let mut text =
        "Times in milliseconds, means over the layers; the whole has the selection in it, and nothing chooses the \
                    random blocks. Ratio is blocks over whole, speed-up dense over whole.\n"
            .to_owned();
    let mut pictures = Vec::new();
    for length in by_length(&rows)? {
        for (method, settings) in length.methods() {
            let points = points(&settings);
            let table = times(option(method), &points);
            text.push_str(&format!("\n{}, {}:\n\n{table}", inline(method), length.heading()));
            pictures.push(picture(method, &length, &points)?);
        }
    }
    Ok(Section { directory: directory.to_owned(), pictures, text, sources: Sources::of(&rows) })
}

/// The option that trades error for density. Rows hold only its value.
fn option(method: &str) -> &'static str {
    let spec: Option<MethodSpec> = method.parse().ok();
    let knob = spec.and_then(|spec| find(spec.name()).ok()?.knob);
    knob.map_or("value", |knob| knob.option)
}

fn points(settings: &[&Setting<SpeedRow>]) -> Vec<Point> {
    let point = |own: &&Setting<SpeedRow>| {
        let milliseconds = |of: fn(&SpeedRow) -> f64| 1e3 * own.mean(of);
        Point {
            value: own.row().value,
            density: own.mean(|row| row.density),
            block_density: own.mean(|row| row.block_density),
            selection: milliseconds(|row| row.selection_seconds),
            whole: milliseconds(|row| row.seconds),
            blocks: milliseconds(|row| row.block_seconds),
            dense: milliseconds(|row| row.dense_seconds),
        }
    };
    let mut points: Vec<Point> = settings.iter().map(point).collect();
    points.sort_by(|a, b| a.density.total_cmp(&b.density));
    points
}

fn picture(method: &str, length: &Length<SpeedRow>, points: &[Point]) -> Result<Picture> {
    let curve = |label: &str, point: fn(&Point) -> (f64, f64)| Series {
        label: label.to_owned(),
        points: points.iter().map(point).collect(),
        marks: true,
    };
    // Dense was measured again with every setting.
    let dense = median(points.iter().map(|point| point.dense).collect());
    let plot = Lines {
        title: format!("{method}, {} tokens", tokens(length.tokens)),
        x: Axis::linear("density"),
        y: Axis::linear("milliseconds"),
        series: vec![
            curve(method.split(':').next().unwrap_or(method), |point| (point.density, point.whole)),
            curve("random blocks", |point| (point.block_density, point.blocks)),
        ],
        levels: vec![Level { label: "dense".to_owned(), y: dense }],
    };
    let name = format!("{NAME}-{}-{}", slug(method), length.tokens);
    let description = format!("Time by density of {method} and of random blocks at {} tokens", length.tokens);
    Picture::new(name, description, (900, 560), plot)
}

fn times(option: &str, points: &[Point]) -> String {
    let header =
        [option, "density", "of the blocks", "selection", "whole", "random blocks", "dense", "ratio", "speed-up"];
    let line = |point: &Point| {
        let Point { value, density, block_density, selection, whole, blocks, dense } = point;
        vec![
            value.map_or("-".to_owned(), |value| value.to_string()),
            share(*density, 3),
            share(*block_density, 3),
            three_digits(*selection),
            three_digits(*whole),
            three_digits(*blocks),
            three_digits(*dense),
            three_digits(blocks / whole),
            three_digits(dense / whole),
        ]
    };
    table(&header, points.iter().map(line))
}
