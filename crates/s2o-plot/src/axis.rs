//! Axes around the data: the place of a value, the values that get a tick, and the name of the quantity.

use super::error::PlotError;
use super::palette::{GRID, INK};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// The mapping from values to places on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// In proportion to the value.
    #[default]
    Linear,
    /// In proportion to the binary logarithm, with ticks such as `4K` for lengths in tokens. Shows values above 0 only.
    Log2,
    /// In proportion to the decimal logarithm. Shows values above 0 only.
    Log10,
}

/// Larger values cannot be distinguished from infinity after scaling.
const LARGEST: f64 = 1e100;

impl Scale {
    /// Whether the scale has a place for `value`.
    pub fn shows(self, value: f64) -> bool {
        value.abs() <= LARGEST && (self == Self::Linear || value >= 1.0 / LARGEST)
    }

    /// Maps a value to a number that is linear on the axis.
    fn forward(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log2 => value.log2(),
            Self::Log10 => value.log10(),
        }
    }
}

/// The part of a scale that is shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    scale: Scale,
    /// Ends, mapped by [`Scale::forward`].
    from: f64,
    to: f64,
}

/// A value to mark on an axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// Place between the ends of the range, 0 to 1.
    pub place: f64,
    pub label: String,
}

impl Range {
    /// The range from `low` to `high`. The scale must show both.
    pub fn new(what: &'static str, scale: Scale, low: f64, high: f64) -> Result<Self, PlotError> {
        if let Some(got) = [low, high].into_iter().find(|end| !scale.shows(*end)) {
            let expected = match scale {
                Scale::Linear => "a finite number of at most 1e100",
                _ => "a finite number above 0",
            };
            return Err(PlotError::wrong(what, expected, got));
        }
        let (from, to) = (scale.forward(low.min(high)), scale.forward(low.max(high)));
        // A single value is shown in the middle of a range of its own size.
        if to - from <= 1e-9 * to.abs().max(from.abs()) || to - from < 1.0 / LARGEST {
            let half = match scale {
                Scale::Linear if from == 0.0 => 0.5,
                Scale::Linear => 0.5 * from.abs(),
                _ => 0.5,
            };
            return Ok(Self { scale, from: from - half, to: to + half });
        }
        Ok(Self { scale, from, to })
    }

    /// The range of the values that the scale shows; `None` if there are none.
    pub fn around(scale: Scale, values: impl Iterator<Item = f64>) -> Option<Self> {
        let ends = values.filter(|value| scale.shows(*value)).map(|value| (value, value));
        let (low, high) = ends.reduce(|(low, high), (value, _)| (value.min(low), value.max(high)))?;
        Self::new("values", scale, low, high).ok()
    }

    /// The range with a share of its length added at both ends.
    pub fn padded(self, share: f64) -> Self {
        let pad = share * (self.to - self.from);
        Self { from: self.from - pad, to: self.to + pad, ..self }
    }

    /// Place of a value that the scale shows: 0 at the low end, 1 at the high end.
    pub fn place(&self, value: f64) -> f64 {
        (self.scale.forward(value) - self.from) / (self.to - self.from)
    }

    /// About `count` ticks at round values.
    pub fn ticks(&self, count: usize) -> Vec<Tick> {
        let count = count.max(2) as f64;
        let span = self.to - self.from;
        let whole = || self.multiples((span / count).ceil());
        let (values, base): (Vec<(f64, String)>, f64) = match self.scale {
            Scale::Linear => {
                let step = round_step(span / count);
                return self.at(self.multiples(step).map(|value| (value, linear_label(value, step))));
            }
            Scale::Log2 => (whole().map(|log| (log, binary_label(log.exp2()))).collect(), 2.0),
            Scale::Log10 if span >= 2.0 => {
                (whole().map(|log| (log, decimal_label(log.round() as i32, 1))).collect(), 10.0)
            }
            Scale::Log10 => (self.decade_parts(), 10.0),
        };
        if values.len() >= 2 {
            return self.at(values);
        }
        // The range has fewer than two round values: ticks as on a linear axis, at their logarithmic places.
        let (low, high) = (base.powf(self.from), base.powf(self.to));
        let mut ticks = Self { scale: Scale::Linear, from: low, to: high }.ticks(count as usize);
        ticks.iter_mut().for_each(|tick| tick.place = self.place(low + tick.place * (high - low)));
        ticks
    }

    /// Ticks at values mapped by [`Scale::forward`].
    fn at(&self, values: impl IntoIterator<Item = (f64, String)>) -> Vec<Tick> {
        let place = |value: f64| (value - self.from) / (self.to - self.from);
        values.into_iter().map(|(value, label)| Tick { place: place(value), label }).collect()
    }

    fn multiples(&self, step: f64) -> impl Iterator<Item = f64> + use<> {
        let slack = 1e-9 * (self.to - self.from);
        let (first, last) = (((self.from - slack) / step).ceil(), ((self.to + slack) / step).floor());
        (0..(last - first + 1.0).clamp(0.0, 50.0) as usize).map(move |i| (first + i as f64) * step)
    }

    /// 1, 2 and 5 in each decade.
    fn decade_parts(&self) -> Vec<(f64, String)> {
        let part =
            |decade: i32, digit: u32| (f64::from(decade) + f64::from(digit).log10(), decimal_label(decade, digit));
        let decades = self.from.floor() as i32..=self.to.floor() as i32;
        let parts = decades.flat_map(|decade| [1, 2, 5].map(|digit| part(decade, digit)));
        let slack = 1e-9 * (self.to - self.from);
        parts.filter(|(log, _)| (self.from - slack..=self.to + slack).contains(log)).collect()
    }
}

/// The next larger of 1, 2, 2.5 and 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= (1.0 - 1e-9) * step).unwrap_or(10.0);
    factor * power
}

fn linear_label(value: f64, step: f64) -> String {
    let largest = value.abs().max(step);
    if !(1e-4..1e6).contains(&step) && !(1e-4..1e6).contains(&largest) {
        // Two decimals are enough to distinguish a few multiples of a round step.
        return if value == 0.0 { "0".to_owned() } else { format!("{value:.2e}") };
    }
    let decimals = (0..8).find(|&decimals| {
        let scaled = step * 10f64.powi(decimals);
        (scaled - scaled.round()).abs() < 1e-6 * scaled
    });
    // -0.0 would be printed with its sign.
    format!("{:.*}", decimals.unwrap_or(8) as usize, if value == 0.0 { 0.0 } else { value })
}

fn binary_label(value: f64) -> String {
    let units = [(1024.0 * 1024.0, "M"), (1024.0, "K"), (1.0, "")];
    match units.into_iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) if value < 1e9 => format!("{}{name}", value / unit),
        None if value > 1e-3 => format!("1/{}", 1.0 / value),
        _ => format!("{value:.1e}"),
    }
}

fn decimal_label(decade: i32, digit: u32) -> String {
    match decade {
        -3..=4 => (f64::from(digit) * 10f64.powi(decade)).to_string(),
        _ => format!("{digit}e{decade}"),
    }
}

/// Ticks of a range of tokens, at multiples of a power of two.
pub fn token_ticks(tokens: &std::ops::Range<usize>, count: usize) -> Vec<Tick> {
    let step = tokens.len().div_ceil(count.max(1)).next_power_of_two().max(1);
    let tick = |token: usize| Tick {
        place: (token - tokens.start) as f64 / tokens.len() as f64,
        label: if token == 0 { "0".to_owned() } else { binary_label(token as f64) },
    };
    (tokens.start.div_ceil(step)..=tokens.end / step).map(|i| tick(i * step)).collect()
}

/// A number with this many decimals; in scientific notation if it would be long or have only zeros.
pub fn number(value: f64, decimals: usize) -> String {
    let decimals = decimals.min(8);
    let magnitude = value.abs();
    if magnitude >= 1e7 || (magnitude > 0.0 && magnitude < 0.5 * 10f64.powi(-(decimals as i32))) {
        format!("{value:.1e}")
    } else {
        format!("{:.decimals$}", if value == 0.0 { 0.0 } else { value })
    }
}

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
/// Length of a tick and of the gap between it and its label, in em.
pub const TICK_AND_GAP: f64 = TICK + 0.25;
/// Largest share of the width for names at the left.
pub const NAME_SHARE: f64 = 0.4;

/// Number of ticks that fit into `length` if each label is `size` long.
pub fn count_for(length: f64, size: f64) -> usize {
    ((length / (2.2 * size)) as usize).clamp(2, 8)
}

/// Height below the data that an axis with one-line labels needs.
pub fn height_below(scene: &Scene, label: &str) -> f64 {
    let lines = if label.is_empty() { 1.0 } else { 2.0 };
    (TICK_AND_GAP + lines * typeface::LINE) * scene.em
}

/// The part of `area` that is left for data if the axes have these labels, `ticks` are at the left, and the data are
/// `top` em and `right` pixels from the other sides.
pub fn room(
    scene: &Scene,
    area: Rect,
    [left_label, label_below]: [&str; 2],
    ticks: &[Tick],
    [top, right]: [f64; 2],
) -> Rect {
    let line = if left_label.is_empty() { 0.0 } else { typeface::LINE };
    Rect {
        left: area.left + widest(ticks, scene.em) + (TICK_AND_GAP + line) * scene.em,
        top: area.top + top * scene.em,
        right: area.right - right,
        bottom: area.bottom - height_below(scene, label_below),
    }
}

/// Width of the widest label.
pub fn widest(ticks: &[Tick], em: f64) -> f64 {
    typeface::widest(ticks.iter().map(|tick| &tick.label), em)
}

/// Labels at the centres of equal parts, cut at the end if they are wider than `available`.
pub fn centred(labels: &[String], em: f64, available: f64) -> Vec<Tick> {
    let place = |i: usize| (i as f64 + 0.5) / labels.len() as f64;
    let label = |label: &String| typeface::fitted(label, em, available);
    labels.iter().enumerate().map(|(i, name)| Tick { place: place(i), label: label(name) }).collect()
}

/// Ticks of a range of numbers, about as many as have room for their labels.
pub fn ticks_along(scene: &Scene, range: &Range, length: f64) -> Vec<Tick> {
    let size = widest(&range.ticks(5), scene.em);
    range.ticks(count_for(length, size.max(1.6 * scene.em) * 0.7))
}

/// Draws ticks, their labels and the axis label below `area`. If labels would touch, only every n-th label is drawn.
pub fn draw_below(scene: &mut Scene, area: Rect, label: &str, ticks: &[Tick]) {
    let (em, hair) = (scene.em, scene.hair());
    let y = area.bottom + (TICK_AND_GAP + 0.5) * em;
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
        scene.label(&label, x, y + typeface::LINE * em, Anchor::Middle);
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
            scene.label(&tick.label, area.left - TICK_AND_GAP * em, y(i), Anchor::End);
        }
    }
    if !label.is_empty() {
        let label = typeface::fitted(label, em, scene.height.min(1.3 * area.height()));
        let half = 0.5 * typeface::width(&label, em);
        let y = (0.5 * (area.top + area.bottom)).clamp(half, (scene.height - half).max(half));
        scene.label_upwards(&label, left + 0.5 * em, y);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, low: f64, high: f64) -> Vec<String> {
        let range = Range::new("axis", scale, low, high).expect("a range");
        range.ticks(6).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_stand_at_round_values() {
        assert_eq!(labels(Scale::Linear, 0.03, 1.0), ["0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(Scale::Linear, -3.0, 9.0), ["-2", "0", "2", "4", "6", "8"]);
        assert_eq!(labels(Scale::Log2, 4096.0, 131_072.0), ["4K", "8K", "16K", "32K", "64K", "128K"]);
        assert_eq!(labels(Scale::Log10, 1e-5, 0.01), ["1e-5", "1e-4", "0.001", "0.01"]);
        assert_eq!(labels(Scale::Log10, 0.004, 0.03), ["0.005", "0.01", "0.02"]);
        assert_eq!(labels(Scale::Log10, 0.41, 0.44).len(), 7);
    }

    #[test]
    fn places_run_from_0_to_1_and_ticks_stay_between() {
        for (scale, low, high) in [
            (Scale::Linear, -1e100, 1e100),
            (Scale::Linear, 1e16, 1e16 + 2.0),
            (Scale::Linear, 0.0, 1e-90),
            (Scale::Linear, 5.0, 5.0),
            (Scale::Linear, 0.0, 0.0),
            (Scale::Log10, 1e-100, 1e100),
            (Scale::Log10, 3.0, 3.0),
            (Scale::Log2, 1e-30, 1e30),
            (Scale::Log2, 3.0, 3.5),
        ] {
            let range = Range::new("axis", scale, low, high).expect("a range");
            assert!(range.place(low) >= 0.0 && range.place(high) <= 1.0, "{range:?}");
            let ticks = range.ticks(6);
            assert!(ticks.len() <= 13, "{ticks:?}");
            assert!(ticks.iter().all(|tick| (-1e-6..=1.0 + 1e-6).contains(&tick.place)), "{range:?} {ticks:?}");
        }
    }
}
