//! [`AttentionMaps`]: a head's softmax mass and the tiles that methods compute, side by side with one colour scale.

use std::ops;

use super::axis;
use super::cells;
use super::error::PlotError;
use super::figure::Plot;
use super::matrix::Matrix;
use super::outline;
use super::palette::{self, OUTLINE};
use super::scale::{Range, Scale, token_ticks};
use super::scene::{Rect, Scene};
use super::tile::Tile;
use super::typeface;

/// Attention probabilities on a logarithmic colour scale, the first query at the top.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionMap {
    /// Heading; may be empty.
    pub title: String,
    /// Probabilities, pooled to the resolution of a picture. NaN (as above the diagonal) stays white.
    pub probabilities: Matrix,
    /// Range of queries that the rows cover.
    pub queries: ops::Range<usize>,
    /// Range of keys that the columns cover.
    pub keys: ops::Range<usize>,
    /// Label of the rows.
    pub query_label: String,
    /// Label of the columns.
    pub key_label: String,
    /// Tiles to outline; adjacent tiles share one outline. If there are tiles, the cells outside them are grey, each as
    /// dark as its colour would be.
    pub tiles: Vec<Tile>,
}

/// Maps in a grid, row by row, with one colour bar.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionMaps {
    /// Heading; may be empty.
    pub title: String,
    /// The maps.
    pub maps: Vec<AttentionMap>,
    /// The number of maps in a row.
    pub columns: usize,
    /// Label of the colour bar.
    pub unit: String,
    /// Probability of the lightest colour. `None`: a hundred-thousandth of the largest probability.
    pub floor: Option<f64>,
}

/// Default floor, as a share of the largest probability.
const FLOOR: f64 = 1e-5;
/// Text size in a map, relative to the ordinary size.
const GRID_TEXT: f64 = 0.85;
/// Smallest ratio of the shorter to the longer side of a map's data at which a token is drawn as wide as high.
const FLATTEST: f64 = 0.2;

impl Plot for AttentionMaps {
    fn draw(&self, scene: &mut Scene, mut area: Rect) -> Result<(), PlotError> {
        if self.columns == 0 {
            return Err(PlotError::wrong("columns of attention maps", "at least 1", 0));
        }
        let range = colour_range(&self.maps, self.floor)?;
        let em = scene.em;
        scene.heading(&self.title, &mut area, 1.1 * em);

        let bar = cells::colour_bar_width(scene, &range, area.height(), &self.unit);
        let columns = self.columns.min(self.maps.len());
        let rows = self.maps.len().div_ceil(columns);
        let gap = 0.8 * em;
        let width = (area.width() - bar - gap * (columns - 1) as f64) / columns as f64;
        let height = (area.height() - gap * (rows - 1) as f64) / rows as f64;
        // The union of the areas of all maps.
        let mut all = Rect { left: f64::MAX, top: f64::MAX, right: f64::MIN, bottom: f64::MIN };
        for (i, map) in self.maps.iter().enumerate() {
            let left = area.left + (i % columns) as f64 * (width + gap);
            let top = area.top + (i / columns) as f64 * (height + gap);
            let place = Rect { left, top, right: left + width, bottom: top + height };
            scene.em = GRID_TEXT * em;
            let data = map.draw_map(scene, place, &range);
            scene.em = em;
            let data = data?;
            all = Rect {
                left: all.left.min(data.left),
                top: all.top.min(data.top),
                right: all.right.max(data.right),
                bottom: all.bottom.max(data.bottom),
            };
        }
        cells::colour_bar(scene, all, all.right + bar, &range, &self.unit)
    }
}

impl AttentionMap {
    /// Draws everything except the colour bar and returns the area of the cells.
    fn draw_map(&self, scene: &mut Scene, mut area: Rect, range: &Range) -> Result<Rect, PlotError> {
        let em = scene.em;
        scene.heading(&self.title, &mut area, em);
        let query_ticks = token_ticks(&self.queries, 4);
        let key_ticks = token_ticks(&self.keys, 4);
        let left = axis::width_left(scene, &self.query_label, axis::labels(&query_ticks));
        let last = key_ticks.last().map_or("", |tick| tick.label.as_str());
        let room = Rect {
            left: area.left + left,
            top: area.top + 0.2 * em,
            // The last label is centred on the edge.
            right: area.right - 0.5 * typeface::width(last, em),
            bottom: area.bottom - axis::height_below(scene, &self.key_label),
        }
        .check(3.0 * em)?;
        let data = self.in_proportion(room);

        let is_inside = self.inside();
        let colour = |cell: usize, value: f64| {
            let shown = value.is_finite().then(|| if value > 0.0 { range.place(value) } else { 0.0 });
            let colour = shown.map(palette::gradient);
            if is_inside[cell] { colour } else { colour.map(palette::grey_of) }
        };
        cells::fill(scene, data, &self.probabilities, colour);
        let x = |key: usize| {
            let key = key.clamp(self.keys.start, self.keys.end) - self.keys.start;
            data.left + data.width() * key as f64 / self.keys.len() as f64
        };
        let y = |query: usize| {
            let query = query.clamp(self.queries.start, self.queries.end) - self.queries.start;
            data.top + data.height() * query as f64 / self.queries.len() as f64
        };
        scene.outline(data);
        for [from, to] in outline::of_union(&self.tiles) {
            scene.line((x(from.0), y(from.1)), (x(to.0), y(to.1)), OUTLINE, 1.8 * scene.hair());
        }
        axis::draw_below(scene, data, &self.key_label, &key_ticks);
        axis::draw_left(scene, data, data.left - left, &self.query_label, &query_ticks, true);
        Ok(data)
    }

    /// For each cell, whether its centre is in a tile; true for all cells if there are no tiles.
    fn inside(&self) -> Vec<bool> {
        let (rows, columns) = (self.probabilities.rows(), self.probabilities.columns());
        let mut inside = vec![self.tiles.is_empty(); rows * columns];
        for tile in &self.tiles {
            let span = cells_within(&tile.keys, &self.keys, columns);
            for row in cells_within(&tile.queries, &self.queries, rows) {
                inside[row * columns..][span.clone()].fill(true);
            }
        }
        inside
    }

    /// The part of `room` in which a query is as high as a key is wide, or all of it if that would be too flat.
    fn in_proportion(&self, room: Rect) -> Rect {
        let (queries, keys) = (self.queries.len() as f64, self.keys.len() as f64);
        let pixels = (room.width() / keys).min(room.height() / queries);
        let (width, height) = (keys * pixels, queries * pixels);
        if width.min(height) < FLATTEST * width.max(height) {
            return room;
        }
        Rect { right: room.left + width, bottom: room.top + height, ..room }
    }
}

/// The cells whose centre is within `tokens`, if `count` cells cover `all` tokens.
fn cells_within(tokens: &ops::Range<usize>, all: &ops::Range<usize>, count: usize) -> ops::Range<usize> {
    let first = |token: usize| {
        let share = (token.clamp(all.start, all.end) - all.start) as f64 / all.len() as f64;
        (share * count as f64 - 0.5).ceil().max(0.0) as usize
    };
    let end = first(tokens.end);
    first(tokens.start).min(end)..end
}

/// The range of probabilities that the colours span.
fn colour_range(maps: &[AttentionMap], floor: Option<f64>) -> Result<Range, PlotError> {
    for map in maps {
        for (what, tokens) in [("queries", &map.queries), ("keys", &map.keys)] {
            if tokens.is_empty() {
                return Err(PlotError::wrong(what, "at least one token", 0));
            }
        }
    }
    let values = || maps.iter().flat_map(|map| map.probabilities.values());
    let largest = values().copied().filter(|value| Scale::Log10.shows(*value)).fold(0.0, f64::max);
    if largest == 0.0 {
        let expected = "a probability above 0";
        return Err(PlotError::wrong("attention map", expected, format!("none among {}", values().count())));
    }
    Range::new("floor of the colours", Scale::Log10, floor.unwrap_or(FLOOR * largest), largest)
}
