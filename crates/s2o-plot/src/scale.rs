//! Scales of axes and colours: the place of a value, and the values that get a tick.

use super::error::PlotError;

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
    pub(super) fn forward(self, value: f64) -> f64 {
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
        for got in [low, high] {
            if !scale.shows(got) {
                let expected = match scale {
                    Scale::Linear => "a finite number of at most 1e100",
                    _ => "a finite number above 0",
                };
                return Err(PlotError::wrong(what, expected, got));
            }
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
    pub fn around(
        what: &'static str,
        scale: Scale,
        values: impl Iterator<Item = f64>,
    ) -> Result<Option<Self>, PlotError> {
        let ends = values.filter(|value| scale.shows(*value)).fold(None, |ends, value| match ends {
            None => Some((value, value)),
            Some((low, high)) => Some((value.min(low), value.max(high))),
        });
        ends.map(|(low, high): (f64, f64)| Self::new(what, scale, low, high)).transpose()
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
        let values = match self.scale {
            Scale::Linear => return self.multiples(round_step(span / count), &linear_label),
            Scale::Log2 => self.multiples((span / count).ceil(), &|log, _| binary_label(log.exp2())),
            Scale::Log10 if span >= 2.0 => {
                self.multiples((span / count).ceil(), &|log, _| decimal_label(log.round() as i32, 1))
            }
            Scale::Log10 => self.decade_parts(),
        };
        if values.len() >= 2 {
            return values;
        }
        // The range has fewer than two round values: ticks as on a linear axis, at their logarithmic places.
        let base: f64 = if self.scale == Scale::Log2 { 2.0 } else { 10.0 };
        let (low, high) = (base.powf(self.from), base.powf(self.to));
        let linear = Self { scale: Scale::Linear, from: low, to: high };
        let place = |tick: &Tick| self.place(low + tick.place * (high - low));
        linear.ticks(count as usize).iter().map(|tick| Tick { place: place(tick), label: tick.label.clone() }).collect()
    }

    fn multiples(&self, step: f64, label: &dyn Fn(f64, f64) -> String) -> Vec<Tick> {
        let slack = 1e-9 * (self.to - self.from);
        let (first, last) = (((self.from - slack) / step).ceil(), ((self.to + slack) / step).floor());
        let count = (last - first + 1.0).clamp(0.0, 50.0) as usize;
        let values = (0..count).map(|i| (first + i as f64) * step);
        values
            .map(|value| Tick { place: (value - self.from) / (self.to - self.from), label: label(value, step) })
            .collect()
    }

    /// 1, 2 and 5 in each decade.
    fn decade_parts(&self) -> Vec<Tick> {
        let decades = self.from.floor() as i32..=self.to.floor() as i32;
        let values = decades.flat_map(|decade| [1, 2, 5].map(|digit| (decade, digit)));
        let ticks = values.map(|(decade, digit)| {
            let log = f64::from(decade) + f64::from(digit).log10();
            Tick { place: (log - self.from) / (self.to - self.from), label: decimal_label(decade, digit) }
        });
        ticks.filter(|tick| (-1e-9..=1.0 + 1e-9).contains(&tick.place)).collect()
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
        0..=4 => (u64::from(digit) * 10u64.pow(decade as u32)).to_string(),
        -3..0 => format!("{:.*}", decade.unsigned_abs() as usize, f64::from(digit) * 10f64.powi(decade)),
        _ => format!("{digit}e{decade}"),
    }
}

/// Ticks of a range of tokens, at multiples of a power of two.
pub fn token_ticks(tokens: &std::ops::Range<usize>, count: usize) -> Vec<Tick> {
    let len = tokens.len();
    let step = len.div_ceil(count.max(1)).next_power_of_two().max(1);
    let places = (tokens.start.div_ceil(step)..=tokens.end / step).map(|i| i * step);
    places
        .map(|token| Tick {
            place: (token - tokens.start) as f64 / len as f64,
            label: if token == 0 { "0".to_owned() } else { binary_label(token as f64) },
        })
        .collect()
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
        assert_eq!(labels(Scale::Log10, 0.004, 0.03), ["0.005", "0.010", "0.020"].map(trimmed));
        assert_eq!(labels(Scale::Log10, 0.41, 0.44).len(), 7);
    }

    fn trimmed(label: &str) -> String {
        label.trim_end_matches('0').to_owned()
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

    #[test]
    fn what_a_scale_cannot_show_is_refused() {
        assert!(matches!(Range::new("axis", Scale::Log10, 0.0, 1.0), Err(PlotError::WrongInput { .. })));
        assert!(Range::new("axis", Scale::Linear, f64::NAN, 1.0).is_err());
        assert!(Range::new("axis", Scale::Linear, 0.0, f64::INFINITY).is_err());
        let values = [f64::NAN, -1.0, 0.0, f64::INFINITY];
        assert_eq!(Range::around("axis", Scale::Log2, values.into_iter()).expect("no error"), None);
    }
}
