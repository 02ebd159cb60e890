//! [`Lines`]: curves over a common axis, such as error against density or speed-up against length.

use super::axis::{self, Axis, Range};
use super::error::PlotError;
use super::figure::Plot;
use super::palette::{self, INK};
use super::scene::{Anchor, Point, Scene};
use super::typeface;

/// One curve.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Series {
    /// Its name, shown at the right of the data.
    pub label: String,
    /// Points (x, y) in the order in which they are joined. A point that an axis cannot show (NaN, infinity, or 0 on a
    /// logarithmic axis) leaves a gap.
    pub points: Vec<(f64, f64)>,
    /// Whether each point gets a mark. Each series has its own shape of mark.
    pub marks: bool,
}

/// A value to compare curves with, drawn as a dashed horizontal line.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Level {
    /// Name of the value.
    pub label: String,
    /// The value on the vertical axis.
    pub y: f64,
}

/// Curves with their names at the right of the data, in the order of their last points.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lines {
    /// Heading; may be empty.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The curves.
    pub series: Vec<Series>,
    /// Values to compare with.
    pub levels: Vec<Level>,
}

/// Length of a curve's sample in the legend, in em.
const SAMPLE: f64 = 1.8;
/// Largest share of the width for the legend.
const LEGEND_SHARE: f64 = 0.4;
const MARK_SHAPES: usize = 5;

impl Plot for Lines {
    fn draw(&self, scene: &mut Scene) -> Result<(), PlotError> {
        let [x_range, y_range] = self.ranges()?;
        let em = scene.em;
        let area = scene.heading(&self.title, scene.area(), 1.15 * em);

        let beside = (SAMPLE + 1.1) * em;
        let legend_room = LEGEND_SHARE * area.width() - beside;
        let names = self.series.iter().map(|series| &series.label).chain(self.levels.iter().map(|level| &level.label));
        let names: Vec<String> = names.map(|name| typeface::fitted(name, em, legend_room)).collect();
        let height = area.height() - axis::height_below(scene, &self.x.label) - 0.5 * em;
        let y_ticks = y_range.ticks(axis::count_for(height, 1.4 * em));
        let sides = [0.5, typeface::widest(&names, em) + beside];
        let data = axis::room(scene, area, [&self.y.label, &self.x.label], &y_ticks, sides);
        let data = data.check(4.0 * em, 4.0 * em)?;
        let x_ticks = axis::ticks_along(scene, &x_range, data.width());
        axis::draw_grid(scene, data, &x_ticks, true);
        axis::draw_grid(scene, data, &y_ticks, false);
        scene.outline(data);
        axis::draw_below(scene, data, &self.x.label, &x_ticks);
        axis::draw_left(scene, data, area.left, &self.y.label, &y_ticks, false);

        let place = |&(x, y): &Point| {
            (data.left + x_range.place(x) * data.width(), data.bottom - y_range.place(y) * data.height())
        };
        let y = |value: f64| data.bottom - y_range.place(value) * data.height();
        for level in &self.levels {
            draw_level(scene, data.left, data.right, y(level.y));
        }
        // Each name stands at the height of the point that is nearest to it.
        let mut heights = Vec::new();
        for (i, series) in self.series.iter().enumerate() {
            let runs = series.points.split(|point| !self.shows(*point));
            for run in runs.filter(|run| !run.is_empty()) {
                let run: Vec<Point> = run.iter().map(place).collect();
                curve(scene, i, &run);
                // No line shows a single point between two gaps.
                if series.marks || run.len() == 1 {
                    run.iter().for_each(|point| mark(scene, i, *point));
                }
            }
            let shown = series.points.iter().filter(|point| self.shows(**point));
            let last = shown.max_by(|a, b| a.0.total_cmp(&b.0));
            heights.push(last.map_or(data.bottom, |point| place(point).1));
        }
        heights.extend(self.levels.iter().map(|level| y(level.y)));

        let places = spread(&heights, typeface::LINE * em, data.top + 0.5 * em, data.bottom - 0.5 * em);
        let left = data.right + 0.6 * em;
        for (entry, (name, y)) in names.iter().zip(places).enumerate() {
            match self.series.get(entry) {
                Some(series) => {
                    curve(scene, entry, &[(left, y), (left + SAMPLE * em, y)]);
                    if series.marks {
                        mark(scene, entry, (left + 0.5 * SAMPLE * em, y));
                    }
                }
                None => draw_level(scene, left, left + SAMPLE * em, y),
            }
            scene.label(name, left + (SAMPLE + 0.45) * em, y, Anchor::Start);
        }
        Ok(())
    }
}

impl Lines {
    fn shows(&self, (x, y): Point) -> bool {
        self.x.scale.shows(x) && self.y.scale.shows(y)
    }

    /// The ranges of both axes.
    fn ranges(&self) -> Result<[Range; 2], PlotError> {
        for level in &self.levels {
            // Refuses a level that the axis cannot show.
            Range::new("level", self.y.scale, level.y, level.y)?;
        }
        let points = || self.series.iter().flat_map(|series| &series.points);
        let shown = || points().filter(|point| self.shows(**point));
        let levels = self.levels.iter().map(|level| level.y);
        let x = Range::around(self.x.scale, shown().map(|point| point.0));
        let y = Range::around(self.y.scale, shown().map(|point| point.1).chain(levels));
        let ranges = x.zip(y).map(|(x, y)| [x.padded(0.03), y.padded(0.05)]);
        ranges.ok_or_else(|| {
            let got = format!("none among {}", points().count());
            PlotError::wrong("series", "a point that both axes can show", got)
        })
    }
}

fn curve(scene: &mut Scene, series: usize, points: &[Point]) {
    let dash = match palette::round(series) {
        0 => None,
        1 => Some((0.6 * scene.em, 0.3 * scene.em)),
        _ => Some((0.2 * scene.em, 0.25 * scene.em)),
    };
    scene.path(points, palette::series(series), 2.5 * scene.hair(), dash);
}

fn draw_level(scene: &mut Scene, left: f64, right: f64, y: f64) {
    scene.path(&[(left, y), (right, y)], INK, 1.5 * scene.hair(), Some((0.5 * scene.em, 0.35 * scene.em)));
}

fn mark(scene: &mut Scene, series: usize, (x, y): Point) {
    let (r, colour) = (0.3 * scene.em, palette::series(series));
    // In units of the radius, x to the right and y downwards.
    let corners: &[Point] = match series % MARK_SHAPES {
        0 => return scene.circle((x, y), r, colour),
        1 => &[(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        2 => &[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
        3 => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
        _ => &[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
    };
    let corners: Vec<Point> = corners.iter().map(|(dx, dy)| (x + dx * r, y + dy * r)).collect();
    scene.polygon(&corners, colour);
}

/// Places near `wanted` that are at least `gap` apart, between `from` and `to`, in the same order.
fn spread(wanted: &[f64], gap: f64, from: f64, to: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    // Too many places move closer together instead of out of the picture.
    let gap = gap.min((to - from) / (wanted.len().max(2) - 1) as f64);
    let mut places = vec![0.0; wanted.len()];
    let mut free = from;
    for &i in &order {
        places[i] = wanted[i].max(free);
        free = places[i] + gap;
    }
    let mut free = to;
    for &i in order.iter().rev() {
        places[i] = places[i].min(free);
        free = places[i] - gap;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spread_in_order_and_stay_inside() {
        let places = spread(&[10.0, 11.0, 98.0, 99.0, 100.0], 10.0, 5.0, 100.0);
        assert_eq!(places, [10.0, 20.0, 80.0, 90.0, 100.0]);
        let crowded = spread(&[50.0; 21], 10.0, 0.0, 100.0);
        assert!(crowded.iter().all(|place| (-1e-9..=100.0 + 1e-9).contains(place)), "{crowded:?}");
        assert!(spread(&[], 10.0, 0.0, 1.0).is_empty());
    }
}
