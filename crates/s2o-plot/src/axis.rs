//! Axes around an area: ticks, their labels, and the name of the quantity.

use super::palette::{GRID, INK};
use super::scale::{Range, Scale, Tick};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// An axis of a plot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Axis {
    /// The quantity and its unit.
    pub label: String,
    /// Scale of the values.
    pub scale: Scale,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Linear }
    }

    /// An axis with binary logarithm, as for lengths in tokens.
    pub fn log2(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Log2 }
    }

    /// An axis with decimal logarithm, as for errors.
    pub fn log10(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Log10 }
    }
}

/// Length of a tick, in em.
const TICK: f64 = 0.3;
/// Gap between a tick and its label, and between a label and the next element, in em.
const GAP: f64 = 0.25;

/// Number of ticks that fit into `length` if each label is `size` long.
pub fn count_for(length: f64, size: f64) -> usize {
    ((length / (2.2 * size)) as usize).clamp(2, 8)
}

/// Height below the data that an axis with one-line labels needs.
pub fn height_below(scene: &Scene, label: &str) -> f64 {
    let lines = if label.is_empty() { 1.0 } else { 2.0 };
    (TICK + GAP + lines * typeface::LINE) * scene.em
}

/// Width left of the data that these tick labels and the axis label need.
pub fn width_left<'a>(scene: &Scene, label: &str, ticks: impl IntoIterator<Item = &'a String>) -> f64 {
    let line = if label.is_empty() { 0.0 } else { typeface::LINE };
    typeface::widest(ticks, scene.em) + (TICK + GAP + line) * scene.em
}

pub fn labels(ticks: &[Tick]) -> impl Iterator<Item = &String> {
    ticks.iter().map(|tick| &tick.label)
}

/// Ticks of a range of numbers, about as many as have room for their labels.
pub fn ticks_along(scene: &Scene, range: &Range, length: f64) -> Vec<Tick> {
    let size = typeface::widest(labels(&range.ticks(5)), scene.em);
    range.ticks(count_for(length, size.max(1.6 * scene.em) * 0.7))
}

/// Draws ticks, their labels and the axis label below `area`. If labels would touch, only every n-th label is drawn.
pub fn draw_below(scene: &mut Scene, area: Rect, label: &str, ticks: &[Tick]) {
    let (em, hair) = (scene.em, scene.hair());
    let y = area.bottom + (TICK + GAP + 0.5) * em;
    let halves: Vec<f64> = ticks.iter().map(|tick| 0.5 * typeface::width(&tick.label, em)).collect();
    let x = |i: usize| area.left + ticks[i].place * area.width();
    let step = step_that_fits(ticks.len(), |i, j| x(i) + halves[i] + 0.5 * em <= x(j) - halves[j]);
    for (i, tick) in ticks.iter().enumerate() {
        let x = x(i);
        scene.line((x, area.bottom), (x, area.bottom + TICK * em), INK, hair);
        if i % step == 0 && x - halves[i] >= 0.0 && x + halves[i] <= scene.width {
            scene.label(&tick.label, x, y, Anchor::Middle);
        }
    }
    if !label.is_empty() {
        let label = typeface::fitted(label, em, scene.width.min(1.6 * area.width()));
        let half = 0.5 * typeface::width(&label, em);
        let x = (0.5 * (area.left + area.right)).clamp(half, (scene.width - half).max(half));
        scene.label(label, x, y + typeface::LINE * em, Anchor::Middle);
    }
}

/// The smallest step at which labels do not touch. `fit(i, j)` says whether label `j` may follow label `i`.
fn step_that_fits(count: usize, fit: impl Fn(usize, usize) -> bool) -> usize {
    let fits = |step: &usize| (*step..count).step_by(*step).all(|next| fit(next - step, next));
    (1..count).find(fits).unwrap_or(count.max(1))
}

/// Draws ticks, their labels and the axis label between `left` and `area`. Places are measured from the bottom, or from
/// the top if `downwards`.
pub fn draw_left(scene: &mut Scene, area: Rect, left: f64, label: &str, ticks: &[Tick], downwards: bool) {
    let (em, hair) = (scene.em, scene.hair());
    let y = |i: usize| {
        let place = ticks[i].place;
        area.top + area.height() * if downwards { place } else { 1.0 - place }
    };
    let step = step_that_fits(ticks.len(), |i, j| (y(i) - y(j)).abs() >= 1.1 * em);
    for (i, tick) in ticks.iter().enumerate() {
        scene.line((area.left, y(i)), (area.left - TICK * em, y(i)), INK, hair);
        if i % step == 0 {
            scene.label(&tick.label, area.left - (TICK + GAP) * em, y(i), Anchor::End);
        }
    }
    if !label.is_empty() {
        let label = typeface::fitted(label, em, scene.height.min(1.3 * area.height()));
        let half = 0.5 * typeface::width(&label, em);
        let y = (0.5 * (area.top + area.bottom)).clamp(half, (scene.height - half).max(half));
        scene.label_upwards(label, left + 0.5 * em, y);
    }
}

/// Draws lines across `area` at the ticks of the bottom axis (`is_vertical`) or of the left axis.
pub fn draw_grid(scene: &mut Scene, area: Rect, ticks: &[Tick], is_vertical: bool) {
    for tick in ticks {
        let (x, y) = (area.left + tick.place * area.width(), area.bottom - tick.place * area.height());
        let (from, to) = match is_vertical {
            true => ((x, area.top), (x, area.bottom)),
            false => ((area.left, y), (area.right, y)),
        };
        scene.line(from, to, GRID, scene.hair());
    }
}
