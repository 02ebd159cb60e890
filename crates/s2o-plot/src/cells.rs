//! Cells of a matrix as coloured rectangles, and the colour bar.

use super::axis;
use super::error::PlotError;
use super::matrix::Matrix;
use super::palette::{self, Colour, INK};
use super::scale::{Range, Tick};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// Width of the bar, in em.
const BAR: f64 = 1.0;
/// Gap left of the bar, in em.
const APART: f64 = 0.9;
/// Gap between the bar and its labels, in em.
const GAP: f64 = 0.5;

/// Fills `area` with the cells of `matrix`. `colour` gets the index (row by row) and the value of a cell; cells without
/// a colour are not painted.
pub fn fill(scene: &mut Scene, area: Rect, matrix: &Matrix, colour: impl Fn(usize, f64) -> Option<Colour>) {
    let columns = matrix.columns();
    let x = |column: usize| area.left + area.width() * column as f64 / columns as f64;
    let y = |row: usize| area.top + area.height() * row as f64 / matrix.rows() as f64;
    // Edges within a pixel blend with the paper: cells that only touch would show light seams.
    let overlap = 1.0;
    let colours: Vec<_> = matrix.values().iter().enumerate().map(|(cell, value)| colour(cell, *value)).collect();
    for (row, colours) in colours.chunks(columns.max(1)).enumerate() {
        // One rectangle for neighbours of the same colour.
        let mut from = 0;
        for run in colours.chunk_by(|a, b| a == b) {
            let to = from + run.len();
            if let Some(colour) = run[0] {
                let right = (x(to) + overlap).min(area.right);
                let bottom = (y(row + 1) + overlap).min(area.bottom);
                scene.fill(Rect { left: x(from), top: y(row), right, bottom }, colour);
            }
            from = to;
        }
    }
}

/// Width of [`colour_bar`], including the gap left of it.
pub fn colour_bar_width(scene: &Scene, range: &Range, height: f64, label: &str) -> f64 {
    let ticks = colour_ticks(scene, range, height);
    let line = if label.is_empty() { 0.0 } else { typeface::LINE };
    typeface::widest(axis::labels(&ticks), scene.em) + (APART + BAR + GAP + line) * scene.em
}

/// Draws the colours of `range` right of `data`, with the same height. The labels end at `right`.
pub fn colour_bar(scene: &mut Scene, data: Rect, right: f64, range: &Range, label: &str) -> Result<(), PlotError> {
    const STRIPES: usize = 49;
    let em = scene.em;
    let bar = Rect { left: data.right + APART * em, right: data.right + (APART + BAR) * em, ..data };
    let values = (0..STRIPES).rev().map(|i| i as f64 / (STRIPES - 1) as f64).collect();
    fill(scene, bar, &Matrix::new(STRIPES, 1, values)?, |_, share| Some(palette::gradient(share)));
    scene.outline(bar);
    for tick in colour_ticks(scene, range, data.height()) {
        let y = bar.bottom - tick.place * bar.height();
        scene.line((bar.right, y), (bar.right + 0.25 * em, y), INK, scene.hair());
        scene.label(tick.label, bar.right + GAP * em, y, Anchor::Start);
    }
    if !label.is_empty() {
        let label = typeface::fitted(label, em, data.height());
        scene.label_upwards(label, right - 0.5 * em, 0.5 * (data.top + data.bottom));
    }
    Ok(())
}

fn colour_ticks(scene: &Scene, range: &Range, height: f64) -> Vec<Tick> {
    range.ticks(axis::count_for(height, 1.2 * scene.em))
}
