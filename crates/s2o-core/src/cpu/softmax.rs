//! The softmax of one score tile, vectorised across queries.

use std::f32::consts::LOG2_E;

use pulp::{Arch, Simd, WithSimd};

/// Number of queries in one pass of the inner loops. The `lanes` of every tile are a multiple of it.
pub(super) const LANES: usize = 16;

/// Per-query results of [`exponentiate`], each `lanes` long.
#[derive(Debug, Default)]
pub(super) struct Columns {
    /// The new maximum m'
    pub(super) new_max: Vec<f32>,
    /// `2^(m - m')`
    pub(super) rescale: Vec<f32>,
    /// `sum 2^(s - m')` over the tile
    pub(super) tile_sum: Vec<f32>,
    /// `max 2^(s - m')` over the tile
    pub(super) largest: Vec<f32>,
}

/// Turns scores `(keys, lanes)`, in units of log2, into weights `2^(s - m')` in place.
///
/// A score of `-inf` is a masked key and weighs exactly 0; NaN stays NaN.
pub(super) fn exponentiate(scores: &mut [f32], row_max: &[f32], columns: &mut Columns) {
    let lanes = row_max.len();
    for column in [&mut columns.new_max, &mut columns.rescale, &mut columns.tile_sum, &mut columns.largest] {
        column.resize(lanes, 0.0);
    }
    Arch::new().dispatch(Exponentiate { scores, row_max, columns });
}

struct Exponentiate<'a> {
    scores: &'a mut [f32],
    row_max: &'a [f32],
    columns: &'a mut Columns,
}

impl WithSimd for Exponentiate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let lanes = self.row_max.len();
        for first in (0..lanes).step_by(LANES) {
            let old_max: [f32; LANES] = self.row_max[first..first + LANES].try_into().expect("LANES long");
            let mut tile_max = [f32::NEG_INFINITY; LANES];
            for scores in self.scores.chunks_exact(lanes) {
                let scores = &scores[first..first + LANES];
                for (max, &score) in tile_max.iter_mut().zip(scores) {
                    *max = if score > *max { score } else { *max };
                }
            }
            let mut max = old_max;
            for (max, &of_tile) in max.iter_mut().zip(&tile_max) {
                *max = if of_tile > *max { of_tile } else { *max };
            }
            let mut sum = [0.0f32; LANES];
            for scores in self.scores.chunks_exact_mut(lanes) {
                let scores = &mut scores[first..first + LANES];
                for ((score, sum), &max) in scores.iter_mut().zip(&mut sum).zip(&max) {
                    *score = exp2::<S>(*score - max);
                    *sum += *score;
                }
            }
            for i in 0..LANES {
                self.columns.new_max[first + i] = max[i];
                self.columns.rescale[first + i] = exp2::<S>(old_max[i] - max[i]);
                self.columns.tile_sum[first + i] = sum[i];
                self.columns.largest[first + i] = exp2::<S>(tile_max[i] - max[i]);
            }
        }
    }
}

/// Replaces scores by `softcap * tanh(score / softcap)`, both in units of log2. NaN stays NaN.
pub(super) fn cap(scores: &mut [f32], softcap: f32) {
    Arch::new().dispatch(Cap { scores, softcap });
}

struct Cap<'a> {
    scores: &'a mut [f32],
    softcap: f32,
}

impl WithSimd for Cap<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // tanh(|x|) = (1 - e) / (1 + e) with e = exp(-2 |x|).
        let exponent = -2.0 * LOG2_E / self.softcap;
        for score in self.scores.iter_mut() {
            let e = exp2::<S>(score.abs() * exponent);
            *score = (self.softcap * (1.0 - e) / (1.0 + e)).copysign(*score);
        }
    }
}

/// `acc[d][i] *= rescale[i]` for an `acc` of columns as long as `rescale`.
pub(super) fn rescale_columns(acc: &mut [f32], rescale: &[f32]) {
    // Ranked keys come in descending order, so most tiles do not change any maximum.
    if rescale.iter().all(|&r| r == 1.0) {
        return;
    }
    Arch::new().dispatch(|| {
        for column in acc.chunks_exact_mut(rescale.len()) {
            for (acc, &r) in column.iter_mut().zip(rescale) {
                *acc *= r;
            }
        }
    });
}

/// `2^x` for `x <= 0`, within 2 units in the last place; 0 below the smallest normal number.
#[inline(always)]
fn exp2<S: Simd>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // This form propagates NaN.
    let clamped = if x < -126.0 { -126.0 } else { x };
    let rounded = clamped + ROUND;
    let fraction = clamped - (rounded - ROUND);
    // Minimax polynomial of (2^f - 1) / f on [-1/2, 1/2] (Cephes exp2f).
    let mut p = 1.535_336_2e-4;
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        p = multiply_add::<S>(p, fraction, c);
    }
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(0x3f80_0000));
    let power = p * scale;
    if x < -126.0 { 0.0 } else { power }
}

/// `a * b + c`, fused if the instruction exists: without it, `mul_add` is a slow library call.
#[inline(always)]
fn multiply_add<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::IS_SCALAR { a * b + c } else { a.mul_add(b, c) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exp2_all(xs: &[f32]) -> Vec<f32> {
        let mut scores: Vec<f32> = xs.iter().flat_map(|&x| [x; LANES]).collect();
        exponentiate(&mut scores, &[0.0; LANES], &mut Columns::default());
        scores.chunks_exact(LANES).map(|row| row[LANES - 1]).collect()
    }

    #[test]
    fn exp2_is_accurate_and_exact_at_integers() {
        let xs: Vec<f32> = (0..=126_000).map(|i| -(i as f32) / 1000.0).collect();
        for (&x, got) in xs.iter().zip(exp2_all(&xs)) {
            let want = f64::from(x).exp2();
            assert!((f64::from(got) / want - 1.0).abs() < 2.4e-7, "2^{x}: {got:e}, expected {want:e}");
            if x.fract() == 0.0 {
                assert_eq!(f64::from(got), want);
            }
        }
    }

    #[test]
    fn caps_are_those_of_tanh() {
        let xs: Vec<f32> = (-4000..=4000).map(|i| i as f32 / 20.0).collect();
        let mut scores = xs.clone();
        cap(&mut scores, 30.0);
        for (&x, got) in xs.iter().zip(scores) {
            let want = 30.0 * (f64::from(x) / 30.0).tanh();
            assert!((f64::from(got) - want).abs() < 2e-5, "{x}: {got}, expected {want}");
        }
        let mut extremes = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0];
        cap(&mut extremes, 30.0);
        assert_eq!((extremes[0], extremes[1], extremes[3]), (30.0, -30.0, 0.0));
        assert!(extremes[2].is_nan());
    }

    #[test]
    fn exp2_of_masked_and_poisoned_scores() {
        assert_eq!(exp2_all(&[f32::NEG_INFINITY, -127.0, -1e30, 0.0]), [0.0, 0.0, 0.0, 1.0]);
        assert!(exp2_all(&[f32::NAN])[0].is_nan());
    }
}
