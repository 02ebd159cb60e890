//! [`ProbeStats`]: the error that the probes of a head and segment measure.

use std::ptr;

use super::{Probe, Tail};
use crate::config::S2oConfig;

/// Passes over the rows of a head and segment that were replaced by another pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Repeated {
    passes: usize,
    tiles: f64,
}

impl Repeated {
    /// Adds a pass that visited `visited` tiles and measured `stats`.
    pub(crate) fn add(&mut self, visited: usize, stats: &ProbeStats) {
        self.passes += 1;
        self.tiles += visited as f64 + stats.tiles;
    }
}

/// What the probes of one head and segment measured. The sums are estimates for all of its rows outside the dense tail
/// (Horvitz and Thompson, 1952): each probe counts for as many rows as it stands for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProbeStats {
    /// Segment number, on absolute positions.
    pub segment: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of probes.
    pub probes: usize,
    /// Sum of squared L2 norms of the exact outputs.
    pub norm: f64,
    /// Sum of squared L2 errors of the sparse outputs.
    pub uncorrected: f64,
    /// Sum of squared L2 errors of the final outputs. Probes are exact, and predict the others as the other probes
    /// predict them (leave one out), unless that is no better: then the outputs were not corrected.
    pub corrected: f64,
    /// Sum of the shares of softmax mass that the rows skipped.
    pub skipped_mass: f64,
    /// Work of the probes' exact attention and of passes that were repeated, in tiles of the call. A CPU leaves out the
    /// exact attention of probes that saw every key.
    pub tiles: f64,
    /// Number of times that the rows were computed again, for [`S2oConfig::max_error`].
    pub repeats: usize,
    /// Sums over the probes of norm * norm, norm * corrected and corrected * corrected, as they count.
    squares: [f64; 3],
}

impl ProbeStats {
    /// Measures the probes of one head and segment with `rows` rows. The tail is that of all probes; it is `None` if it
    /// would not lower the error of probes that did not contribute to it, and then nothing is corrected.
    pub(crate) fn measure(segment: usize, rows: usize, probes: &[Probe], config: &S2oConfig) -> (Self, Option<Tail>) {
        let finite: Vec<&Probe> = probes.iter().filter(|probe| probe.is_finite()).collect();
        let others = |i: usize| Tail::of(finite.iter().copied().filter(|other| !ptr::eq(*other, &probes[i])));
        let uncorrected: Vec<f64> = probes.iter().map(|probe| squared_distance(&probe.out, &probe.exact)).collect();
        let corrected: Vec<f64> = probes
            .iter()
            .enumerate()
            .map(|(i, probe)| match (others(i), probe.expected) {
                (Some(tail), Some(expected)) => squared_distance(&tail.corrected(&probe.out, expected), &probe.exact),
                _ => uncorrected[i],
            })
            .collect();
        let sum = |errors: &[f64]| {
            let finite = errors.iter().zip(probes).filter(|(_, probe)| probe.is_finite());
            finite.map(|(error, probe)| probe.weight * error).sum::<f64>()
        };
        let tail = Tail::of(finite.iter().copied()).filter(|_| sum(&corrected) < sum(&uncorrected));
        let keys: usize = probes.iter().map(|probe| probe.keys).sum();
        let tiles = keys as f64 / (config.tile_q() * config.tile_k()) as f64;
        let mut stats = Self { segment, rows, probes: probes.len(), tiles, ..Self::default() };
        let corrected = if tail.is_some() { &corrected } else { &uncorrected };
        for ((probe, uncorrected), corrected) in probes.iter().zip(&uncorrected).zip(corrected) {
            let norm = probe.weight * probe.exact.iter().map(|x| x * x).sum::<f64>();
            // The probe itself is exact.
            let corrected = (probe.weight - 1.0) * corrected;
            stats.norm += norm;
            stats.uncorrected += probe.weight * uncorrected;
            stats.corrected += corrected;
            let squares = [norm * norm, norm * corrected, corrected * corrected];
            stats.squares.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
            stats.skipped_mass += probe.weight * probe.skipped;
        }
        (stats, tail)
    }

    /// The sums of a backend that computes them itself: those of the public fields from `norm` to `skipped_mass`, then
    /// of norm * norm, norm * corrected and corrected * corrected.
    pub fn from_sums(segment: usize, [rows, probes]: [usize; 2], tiles: f64, sums: [f64; 7]) -> Self {
        let [norm, uncorrected, corrected, skipped_mass, squares @ ..] = sums;
        Self { segment, rows, probes, norm, uncorrected, corrected, skipped_mass, tiles, repeats: 0, squares }
    }

    /// The last measurement of the same rows, with the work of the `earlier` passes that it replaces.
    pub(crate) fn replacing(self, earlier: Repeated) -> Self {
        Self { tiles: self.tiles + earlier.tiles, repeats: earlier.passes, ..self }
    }

    /// Estimate of the relative L2 error of the final outputs; 0 without probes, NaN if a probe has NaN. Queries may
    /// have larger errors that no probe met, see [`ProbeStats::interval`].
    pub fn relative_error(&self) -> f64 {
        if self.norm == 0.0 { 0.0 } else { (self.corrected / self.norm).sqrt() }
    }

    /// An interval for the relative L2 error of the final outputs, with about 95 % confidence. It reaches two standard
    /// errors of the ratio of the sums to both sides. The upper end also allows for errors that no probe has met: three
    /// in as many queries as there are probes may be entirely wrong (the rule of three). That matters, because often a
    /// few queries have most of the error.
    pub fn interval(&self) -> (f64, f64) {
        if self.norm == 0.0 {
            return (0.0, f64::INFINITY);
        }
        let ratio = self.corrected / self.norm;
        let [norms, products, errors] = self.squares;
        // Sum of (error - ratio * norm)^2; rounding must not make it negative.
        let residuals = (errors - 2.0 * ratio * products + ratio * ratio * norms).max(0.0);
        let reach = 2.0 * residuals.sqrt() / self.norm;
        ((ratio - reach).max(0.0).sqrt(), (ratio + reach + 3.0 / self.probes as f64).sqrt())
    }

    /// The sums over the probes of both. The segment is that of `self`.
    pub fn plus(self, more: Self) -> Self {
        Self {
            segment: self.segment,
            rows: self.rows + more.rows,
            probes: self.probes + more.probes,
            norm: self.norm + more.norm,
            uncorrected: self.uncorrected + more.uncorrected,
            corrected: self.corrected + more.corrected,
            skipped_mass: self.skipped_mass + more.skipped_mass,
            tiles: self.tiles + more.tiles,
            repeats: self.repeats + more.repeats,
            squares: std::array::from_fn(|i| self.squares[i] + more.squares[i]),
        }
    }

    /// Mean share of the softmax mass that the rows skipped; 0 without probes.
    pub fn mean_skipped_mass(&self) -> f64 {
        if self.rows == 0 { 0.0 } else { self.skipped_mass / self.rows as f64 }
    }
}

fn squared_distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_that_does_not_help_is_left_out() {
        let probe = |exact: f64| Probe {
            out: vec![0.0],
            expected: Some(0.1),
            exact: vec![exact],
            skipped: 0.5,
            keys: 1,
            weight: 3.0,
        };
        let measure = |exact: [f64; 2]| ProbeStats::measure(3, 6, &exact.map(probe), &S2oConfig::default());
        // The tail of the other probe is -2 for 1 and 2 for -1, so the corrected outputs would be -1 and 1.
        let (stats, tail) = measure([1.0, -1.0]);
        // The probes stand for two more queries each.
        assert_eq!((stats.uncorrected, stats.corrected, tail), (6.0, 4.0, None));
        // A common tail of 2.
        let (stats, tail) = measure([1.0, 1.0]);
        assert_eq!((stats.segment, stats.rows, stats.uncorrected), (3, 6, 6.0));
        assert_eq!(stats.mean_skipped_mass(), 0.5);
        assert!(stats.corrected < 1e-12 && tail.is_some_and(|tail| (tail.value[0] - 2.0).abs() < 1e-12));
        // The corrected error of each would be 4 instead of 9 and 1: better if the first stands for more queries.
        for (weights, helps) in [([3.0, 1.0], true), ([1.0, 3.0], false)] {
            let [first, second] =
                [(3.0, weights[0]), (1.0, weights[1])].map(|(exact, weight)| Probe { weight, ..probe(exact) });
            assert_eq!(ProbeStats::measure(3, 4, &[first, second], &S2oConfig::default()).1.is_some(), helps);
        }
        // NaN in a third probe shows in the error, and does not take part in the decision.
        for (broken, shows) in [
            (probe(f64::NAN), true),
            (Probe { out: vec![f64::NAN], ..probe(1.0) }, true),
            (Probe { skipped: f64::NAN, ..probe(1.0) }, false),
        ] {
            let (stats, tail) =
                ProbeStats::measure(3, 9, &[probe(1.0), probe(1.0), broken.clone()], &S2oConfig::default());
            assert!(tail.is_some_and(|tail| (tail.value[0] - 2.0).abs() < 1e-12), "{broken:?}");
            assert!(stats.relative_error().is_nan() || !shows, "{broken:?}");
        }
    }

    #[test]
    fn the_interval_allows_for_what_no_probe_met() {
        let probe =
            |out: f64| Probe { out: vec![out], expected: None, exact: vec![2.0], skipped: 0.25, keys: 1, weight: 2.0 };
        let measure = |outs: &[f64]| {
            let probes: Vec<Probe> = outs.iter().copied().map(probe).collect();
            ProbeStats::measure(0, 2 * probes.len(), &probes, &S2oConfig::default()).0
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        // Errors 1, 1, 1, 1 of norms 4: no spread, so only the unseen errors widen the interval.
        let same = measure(&[1.0, 3.0, 1.0, 3.0]);
        // Each probe stands for itself, which is exact, and for one other query.
        near(same.relative_error(), 0.125f64.sqrt());
        near(same.interval().0, 0.125f64.sqrt());
        near(same.interval().1, 0.875f64.sqrt());
        // Errors 0, 0, 0, 4 of norms 8: the ratio is 1/8, the residuals -1, -1, -1, 3.
        let spread = measure(&[2.0, 2.0, 2.0, 4.0]);
        near(spread.interval().0, 0.0);
        near(spread.interval().1, (0.125 + 2.0 * 12f64.sqrt() / 32.0 + 0.75).sqrt());
        // The sums of parts are those of the whole.
        assert_eq!(measure(&[2.0, 2.0]).plus(measure(&[2.0, 4.0])), spread);
        assert_eq!(measure(&[]).interval(), (0.0, f64::INFINITY));
        near(same.tiles, 4.0 / 128.0 / 128.0);
    }

    #[test]
    fn passes_that_were_replaced_count_as_work() {
        let measured = |tiles| ProbeStats::from_sums(0, [1; 2], tiles, [0.0; 7]);
        let mut earlier = Repeated::default();
        earlier.add(10, &measured(0.5));
        earlier.add(20, &measured(1.5));
        let last = measured(2.0).replacing(earlier);
        assert_eq!((last.repeats, last.tiles), (2, 34.0));
        let sum = last.plus(last).plus(last);
        assert_eq!((sum.repeats, sum.tiles), (6, 102.0));
    }
}
