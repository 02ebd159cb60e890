//! Colours that are distinguishable in grey and for every kind of colour vision: the series of Okabe and Ito, and a
//! sequential gradient from light to dark (ColorBrewer's YlGnBu).

use std::fmt;

/// Red, green and blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02X}{:02X}{:02X}", self.0, self.1, self.2)
    }
}

impl From<Colour> for tiny_skia::Color {
    fn from(Colour(red, green, blue): Colour) -> Self {
        Self::from_rgba8(red, green, blue, 255)
    }
}

/// Text and axes.
pub const INK: Colour = Colour(32, 32, 32);
/// Grid lines.
pub const GRID: Colour = Colour(222, 222, 222);
/// Background.
pub const PAPER: Colour = Colour(255, 255, 255);
/// Cells without a value.
pub const BLANK: Colour = Colour(232, 232, 232);
/// Outlines on top of the gradient.
pub const OUTLINE: Colour = Colour(213, 94, 0);

const SERIES: [Colour; 7] = [
    Colour(0, 114, 178),
    Colour(213, 94, 0),
    Colour(0, 158, 115),
    Colour(204, 121, 167),
    Colour(230, 159, 0),
    Colour(86, 180, 233),
    Colour(0, 0, 0),
];

const GRADIENT: [Colour; 9] = [
    Colour(255, 255, 217),
    Colour(237, 248, 177),
    Colour(199, 233, 180),
    Colour(127, 205, 187),
    Colour(65, 182, 196),
    Colour(29, 145, 192),
    Colour(34, 94, 168),
    Colour(37, 52, 148),
    Colour(8, 29, 88),
];

/// Steps of the gradient: few, so that neighbouring cells of an SVG often share a colour.
const STEPS: f64 = 48.0;

/// The colour of the `i`-th series. Colours repeat after the seventh.
pub fn series(i: usize) -> Colour {
    SERIES[i % SERIES.len()]
}

/// Number of times that all colours were used before the `i`-th series.
pub fn round(i: usize) -> usize {
    i / SERIES.len()
}

/// The colour of a value between 0 (light) and 1 (dark).
pub fn gradient(share: f64) -> Colour {
    let share = (share.clamp(0.0, 1.0) * STEPS).round() / STEPS * (GRADIENT.len() - 1) as f64;
    let below = (share as usize).min(GRADIENT.len() - 2);
    let (Colour(r0, g0, b0), Colour(r1, g1, b1)) = (GRADIENT[below], GRADIENT[below + 1]);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (share - below as f64)).round() as u8;
    Colour(mix(r0, r1), mix(g0, g1), mix(b0, b1))
}

/// Black or white, whichever is easier to read on `ground`.
pub fn text_on(ground: Colour) -> Colour {
    if luminance(ground) > 140.0 { INK } else { PAPER }
}

/// The grey that is as dark as `colour`.
pub fn grey_of(colour: Colour) -> Colour {
    let grey = luminance(colour).round() as u8;
    Colour(grey, grey, grey)
}

fn luminance(Colour(r, g, b): Colour) -> f64 {
    0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b)
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
