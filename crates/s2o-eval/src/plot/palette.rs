//! Colours that differ for every kind of colour vision, and in grey: the series of Okabe and Ito, and a sequential
//! gradient from light to dark (ColorBrewer's YlGnBu).

use plotters::style::RGBColor;

/// Text and axes.
pub const INK: RGBColor = RGBColor(32, 32, 32);
/// Lines that help to read off values.
pub const GRID: RGBColor = RGBColor(222, 222, 222);
/// The paper.
pub const PAPER: RGBColor = RGBColor(255, 255, 255);
/// Cells without a value.
pub const BLANK: RGBColor = RGBColor(232, 232, 232);
/// Outlines on the gradient.
pub const OUTLINE: RGBColor = RGBColor(213, 94, 0);

const SERIES: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

const GRADIENT: [RGBColor; 9] = [
    RGBColor(255, 255, 217),
    RGBColor(237, 248, 177),
    RGBColor(199, 233, 180),
    RGBColor(127, 205, 187),
    RGBColor(65, 182, 196),
    RGBColor(29, 145, 192),
    RGBColor(34, 94, 168),
    RGBColor(37, 52, 148),
    RGBColor(8, 29, 88),
];

/// Steps of the gradient: few enough that neighbouring cells of an SVG often share one.
const STEPS: f64 = 48.0;

/// The colour of the `i`-th series; they repeat after the seventh.
pub fn series(i: usize) -> RGBColor {
    SERIES[i % SERIES.len()]
}

/// How often the colours were used up before the `i`-th series.
pub fn round(i: usize) -> usize {
    i / SERIES.len()
}

/// The colour of a value between 0 (light) and 1 (dark).
pub fn gradient(share: f64) -> RGBColor {
    let share = (share.clamp(0.0, 1.0) * STEPS).round() / STEPS * (GRADIENT.len() - 1) as f64;
    let below = (share as usize).min(GRADIENT.len() - 2);
    let (RGBColor(r0, g0, b0), RGBColor(r1, g1, b1)) = (GRADIENT[below], GRADIENT[below + 1]);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (share - below as f64)).round() as u8;
    RGBColor(mix(r0, r1), mix(g0, g1), mix(b0, b1))
}

/// Black or white, whichever is easier to read on `ground`.
pub fn text_on(ground: RGBColor) -> RGBColor {
    if luminance(ground) > 140.0 { INK } else { PAPER }
}

/// The grey that is as dark as `colour`.
pub fn grey_of(colour: RGBColor) -> RGBColor {
    let grey = luminance(colour).round() as u8;
    RGBColor(grey, grey, grey)
}

fn luminance(RGBColor(r, g, b): RGBColor) -> f64 {
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
