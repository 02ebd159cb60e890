//! `tau-and-segment`: S2O by threshold and segment length, from the experiment `tau-and-segment`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::tau_and_segment::GridRow;
use s2o_eval::report::table;
use s2o_plot::{Axis, Lines, Series};

use crate::layers::{Length, Setting, by_length, layer_row, read};
use crate::rows::distinct;
use crate::section::{Picture, Section, Sources};
use crate::text::{inline, share, slug, three_digits, tokens};

const NAME: &str = "tau-and-segment";
const COLUMNS: &str = "method, tau, segment, layer, tokens, density, mse, rel_l1, selection_seconds, \
                       attention_seconds, dense_seconds, speed_up";

layer_row!(GridRow, method, |row| { format!("`{}` with tau {} and segment {}", row.method, row.tau, row.segment) });

/// A method's settings at a length.
struct Grid<'r> {
    settings: Vec<&'r Setting<'r, GridRow>>,
    taus: Vec<f64>,
    segments: Vec<usize>,
}

pub fn section(directory: &Path) -> Result<Section> {
    let rows = read::<GridRow>(directory, NAME, COLUMNS)?;
    let mut text =
        "Density, relative L1 error and speed-up over our dense attention, for each tau and segment length in \
                    tokens; means over the layers.\n"
            .to_owned();
    let mut pictures = Vec::new();
    for length in by_length(&rows)? {
        for (method, settings) in length.methods() {
            let grid = Grid::new(settings);
            text.push_str(&format!("\n{}, {}:\n\n{}", inline(method), length.heading(), grid.table()));
            pictures.extend(grid.picture(method, &length)?);
        }
    }
    Ok(Section { directory: directory.to_owned(), pictures, text, sources: Sources::of(&rows) })
}

impl<'r> Grid<'r> {
    fn new(settings: Vec<&'r Setting<'r, GridRow>>) -> Self {
        let mut taus = distinct(settings.iter().map(|own| own.row().tau));
        taus.sort_by(f64::total_cmp);
        let mut segments = distinct(settings.iter().map(|own| own.row().segment));
        segments.sort_unstable();
        Self { settings, taus, segments }
    }

    fn cell(&self, tau: f64, segment: usize) -> Option<&'r Setting<'r, GridRow>> {
        let is_there = |own: &&&Setting<GridRow>| (own.row().tau, own.row().segment) == (tau, segment);
        self.settings.iter().find(is_there).copied()
    }

    /// The error by density for each segment length; `None` if everything was computed.
    fn picture(&self, method: &str, length: &Length<GridRow>) -> Result<Option<Picture>> {
        let point = |own: &Setting<GridRow>| (own.mean(|row| row.density), own.mean(|row| row.rel_l1));
        let curve = |segment: usize| {
            let points = self.taus.iter().filter_map(|&tau| self.cell(tau, segment).map(point));
            Series {
                label: format!("segment {segment}"),
                // At density 1 the error is only rounding, far below that of sparsity.
                points: points.filter(|point| point.0 < 1.0).collect(),
                marks: true,
            }
        };
        let series: Vec<Series> = self.segments.iter().map(|&segment| curve(segment)).collect();
        if series.iter().all(|series| series.points.is_empty()) {
            return Ok(None);
        }
        let plot = Lines {
            title: format!("{method}, {} tokens", tokens(length.tokens)),
            x: Axis::linear("density"),
            y: Axis::log10("relative L1 error"),
            series,
            ..Lines::default()
        };
        let name = format!("{NAME}-{}-{}", slug(method), length.tokens);
        let tokens = length.tokens;
        let description =
            format!("Relative L1 error of {method} by density at {tokens} tokens, one line for each segment length");
        Picture::new(name, description, (900, 560), plot).map(Some)
    }

    fn table(&self) -> String {
        let cell = |tau: f64, segment: usize| {
            self.cell(tau, segment).map_or("-".to_owned(), |own| {
                let seconds = own.mean(|row| row.selection_seconds + row.attention_seconds);
                let [density, rel_l1] = [share(own.mean(|row| row.density), 3), share(own.mean(|row| row.rel_l1), 4)];
                format!("{density}, {rel_l1}, {}x", three_digits(own.mean(|row| row.dense_seconds) / seconds))
            })
        };
        let line = |&tau: &f64| {
            let cells = self.segments.iter().map(|&segment| cell(tau, segment));
            [tau.to_string()].into_iter().chain(cells).collect()
        };
        let mut header = vec!["tau".to_owned()];
        header.extend(self.segments.iter().map(ToString::to_string));
        if let Some(first) = header.get_mut(1) {
            *first = format!("segment {first}");
        }
        table(&header, self.taus.iter().map(line))
    }
}
