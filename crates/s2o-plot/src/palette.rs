//! Colours that are distinguishable in grey and for every kind of colour vision: the series of Okabe and Ito, and a
//! sequential gradient from light to dark (ColorBrewer's YlGnBu).

use std::fmt;

/// Red, green and blue, a byte each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(u32);

impl Colour {
    fn channels(self) -> [f64; 3] {
        [16, 8, 0].map(|shift| f64::from(self.0 >> shift & 0xFF))
    }

    fn of_channels(channels: [f64; 3]) -> Self {
        Self(channels.into_iter().fold(0, |rest, channel| rest << 8 | channel.round() as u32))
    }
}

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:06X}", self.0)
    }
}

impl From<Colour> for tiny_skia::Color {
    fn from(colour: Colour) -> Self {
        let [red, green, blue] = colour.channels().map(|channel| channel as u8);
        Self::from_rgba8(red, green, blue, 255)
    }
}

/// Text and axes.
pub const INK: Colour = Colour(0x202020);
/// Grid lines.
pub const GRID: Colour = Colour(0xDEDEDE);
/// Background.
pub const PAPER: Colour = Colour(0xFFFFFF);
/// Cells without a value.
pub const BLANK: Colour = Colour(0xE8E8E8);
/// Outlines on top of the gradient.
pub const OUTLINE: Colour = Colour(0xD55E00);

const SERIES: [u32; 7] = [0x0072B2, 0xD55E00, 0x009E73, 0xCC79A7, 0xE69F00, 0x56B4E9, 0x000000];

const GRADIENT: [u32; 9] = [0xFFFFD9, 0xEDF8B1, 0xC7E9B4, 0x7FCDBB, 0x41B6C4, 0x1D91C0, 0x225EA8, 0x253494, 0x081D58];

/// Steps of the gradient: few, so that neighbouring cells of an SVG often share a colour.
const STEPS: f64 = 48.0;

/// The colour of the `i`-th series. Colours repeat after the seventh.
pub fn series(i: usize) -> Colour {
    Colour(SERIES[i % SERIES.len()])
}

/// Number of times that all colours were used before the `i`-th series.
pub fn round(i: usize) -> usize {
    i / SERIES.len()
}

/// The colour of a value between 0 (light) and 1 (dark).
pub fn gradient(share: f64) -> Colour {
    let share = (share.clamp(0.0, 1.0) * STEPS).round() / STEPS * (GRADIENT.len() - 1) as f64;
    let below = (share as usize).min(GRADIENT.len() - 2);
    let [low, high] = [below, below + 1].map(|i| Colour(GRADIENT[i]).channels());
    Colour::of_channels([0, 1, 2].map(|i| low[i] + (high[i] - low[i]) * (share - below as f64)))
}

/// Black or white, whichever is easier to read on `ground`.
pub fn text_on(ground: Colour) -> Colour {
    if luminance(ground) > 140.0 { INK } else { PAPER }
}

/// The grey that is as dark as `colour`.
pub fn grey_of(colour: Colour) -> Colour {
    Colour::of_channels([luminance(colour); 3])
}

fn luminance(colour: Colour) -> f64 {
    let [red, green, blue] = colour.channels();
    0.299 * red + 0.587 * green + 0.114 * blue
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_darkens_all_the_way() {
        let greys: Vec<f64> = (0..=48).map(|i| luminance(gradient(f64::from(i) / 48.0))).collect();
        assert!(greys.windows(2).all(|pair| pair[0] > pair[1]), "{greys:?}");
    }
}
