//! [`AttentionMaps`]: a head's softmax mass and the tiles that methods compute, side by side with one colour scale.

use std::{ops, slice};

use super::axis::{self, Range, Scale};
use super::error::PlotError;
use super::figure::Plot;
use super::heatmap::{ColourBar, Matrix, runs};
use super::palette::{self, OUTLINE};
use super::scene::{Rect, Scene};
use super::typeface;

/// A rectangle of an attention map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Its queries, as rows.
    pub queries: ops::Range<usize>,
    /// Its keys, as columns.
    pub keys: ops::Range<usize>,
}

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
    fn draw(&self, scene: &mut Scene) -> Result<(), PlotError> {
        if self.columns == 0 {
            return Err(PlotError::wrong("columns of attention maps", "at least 1", 0));
        }
        let bar = ColourBar { range: colour_range(&self.maps, self.floor)?, label: &self.unit };
        let em = scene.em;
        let area = scene.heading(&self.title, scene.area(), 1.1 * em);

        let bar_width = bar.width(scene, area.height());
        let columns = self.columns.min(self.maps.len());
        let rows = self.maps.len().div_ceil(columns);
        let gap = 0.8 * em;
        let width = (area.width() - bar_width - gap * (columns - 1) as f64) / columns as f64;
        let height = (area.height() - gap * (rows - 1) as f64) / rows as f64;
        // The union of the areas of all maps.
        let mut all = Rect { left: f64::MAX, top: f64::MAX, right: f64::MIN, bottom: f64::MIN };
        scene.em = GRID_TEXT * em;
        for (i, map) in self.maps.iter().enumerate() {
            let left = area.left + (i % columns) as f64 * (width + gap);
            let top = area.top + (i / columns) as f64 * (height + gap);
            let place = Rect { left, top, right: left + width, bottom: top + height };
            let data = map.draw(scene, place, &bar.range)?;
            all = Rect {
                left: all.left.min(data.left),
                top: all.top.min(data.top),
                right: all.right.max(data.right),
                bottom: all.bottom.max(data.bottom),
            };
        }
        scene.em = em;
        bar.draw(scene, all, all.right + bar_width)
    }
}

impl AttentionMap {
    /// Draws everything except the colour bar and returns the area of the cells.
    fn draw(&self, scene: &mut Scene, area: Rect, range: &Range) -> Result<Rect, PlotError> {
        let em = scene.em;
        let area = scene.heading(&self.title, area, em);
        let [query_ticks, key_ticks] = [&self.queries, &self.keys].map(|tokens| axis::token_ticks(tokens, 4));
        // The last label is centred on the edge.
        let right = key_ticks.last().map_or(0.0, |tick| 0.5 * typeface::width(&tick.label, em));
        let room = axis::room(scene, area, [&self.query_label, &self.key_label], &query_ticks, [0.2, right]);
        let data = self.in_proportion(room.check(3.0 * em, 3.0 * em)?);

        let is_inside = self.inside();
        let colour = |cell: usize, value: f64| {
            let shown = value.is_finite().then(|| if value > 0.0 { range.place(value) } else { 0.0 });
            let colour = shown.map(palette::gradient);
            if is_inside[cell] { colour } else { colour.map(palette::grey_of) }
        };
        self.probabilities.draw(scene, data, colour);
        scene.outline(data);
        let place = |(key, query): Corner| {
            let (x, y) = (share(key, &self.keys), share(query, &self.queries));
            (data.left + data.width() * x, data.top + data.height() * y)
        };
        for [from, to] in outline(&self.tiles) {
            scene.line(place(from), place(to), OUTLINE, 1.8 * scene.hair());
        }
        axis::draw_below(scene, data, &self.key_label, &key_ticks);
        axis::draw_left(scene, data, area.left, &self.query_label, &query_ticks, true);
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

/// Place of a token in `all` tokens, 0 to 1.
fn share(token: usize, all: &ops::Range<usize>) -> f64 {
    (token.clamp(all.start, all.end) - all.start) as f64 / all.len() as f64
}

/// The cells whose centre is within `tokens`, if `count` cells cover `all` tokens.
fn cells_within(tokens: &ops::Range<usize>, all: &ops::Range<usize>, count: usize) -> ops::Range<usize> {
    let first = |token: usize| (share(token, all) * count as f64 - 0.5).ceil().max(0.0) as usize;
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

/// A corner as (key, query).
type Corner = (usize, usize);

/// Largest number of parts between the edges of all tiles. If there are more, each tile gets its own outline.
const MOST_PARTS: usize = 1 << 24;

/// The line segments of the outline of the union of `tiles`.
fn outline(tiles: &[Tile]) -> Vec<[Corner; 2]> {
    let tiles = || tiles.iter().filter(|tile| !tile.keys.is_empty() && !tile.queries.is_empty());
    let edges = |side: fn(&Tile) -> &ops::Range<usize>| {
        let mut edges: Vec<usize> = tiles().map(side).flat_map(|side| [side.start, side.end]).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    };
    let (keys, queries) = (edges(|tile| &tile.keys), edges(|tile| &tile.queries));
    if keys.len().saturating_mul(queries.len()) > MOST_PARTS {
        return tiles().flat_map(|tile| outline(slice::from_ref(tile))).collect();
    }

    // Whether each part between edges is covered, with a border of uncovered parts.
    let columns = keys.len() + 1;
    let mut covered = vec![false; columns * (queries.len() + 1)];
    let parts = |edges: &[usize], side: &ops::Range<usize>| {
        let part = |edge: usize| edges.partition_point(|other| *other < edge) + 1;
        part(side.start)..part(side.end)
    };
    for tile in tiles() {
        for row in parts(&queries, &tile.queries) {
            covered[row * columns..][parts(&keys, &tile.keys)].fill(true);
        }
    }
    let covered = |column: usize, row: usize| covered[row * columns + column];

    // The ends of each run of parts between `edges` that are on an outline.
    let runs_of = |edges: &[usize], is_edge: &dyn Fn(usize) -> bool| -> Vec<[usize; 2]> {
        let is_edge: Vec<bool> = (1..edges.len()).map(is_edge).collect();
        let drawn = runs(&is_edge).filter(|(_, is_edge)| **is_edge);
        drawn.map(|(run, _)| [edges[run.start], edges[run.end]]).collect()
    };
    let mut outline = Vec::new();
    for (i, &key) in keys.iter().enumerate() {
        let runs = runs_of(&queries, &|row| covered(i, row) != covered(i + 1, row));
        outline.extend(runs.into_iter().map(|ends| ends.map(|query| (key, query))));
    }
    for (i, &query) in queries.iter().enumerate() {
        let runs = runs_of(&keys, &|column| covered(column, i) != covered(column, i + 1));
        outline.extend(runs.into_iter().map(|ends| ends.map(|key| (key, query))));
    }
    outline
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(keys: ops::Range<usize>, queries: ops::Range<usize>) -> Tile {
        Tile { queries, keys }
    }

    #[test]
    fn what_tiles_share_is_not_outlined() {
        let mut lines = outline(&[tile(0..4, 0..4), tile(4..8, 0..4), tile(0..4, 4..8)]);
        lines.sort();
        let corners = [(0, 0), (0, 8), (4, 4), (4, 8), (8, 0), (8, 4)];
        let expected = [
            [corners[0], corners[1]],
            [corners[0], corners[4]],
            [corners[1], corners[3]],
            [corners[2], corners[3]],
            [corners[2], corners[5]],
            [corners[4], corners[5]],
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn tiles_apart_have_outlines_of_their_own_and_empty_ones_none() {
        assert_eq!(outline(&[tile(0..1, 0..1), tile(2..3, 0..1)]).len(), 8);
        assert!(outline(&[tile(0..0, 0..1)]).is_empty());
        assert!(outline(&[]).is_empty());
    }
}
