//! Exact probe queries: exact attention for a few queries of each segment corrects the others for the keys that they
//! skipped, and measures the error that remains.
//!
//! The keys that the queries of a segment skip have a common mean value, and the mass that they have for a query follows from
//! mean and variance of the keys before the segment. Delta Attention (arXiv 2505.11254) also computes every n-th query exactly,
//! and adds the difference of its output to its neighbours. Here one query of every run is drawn at random after the sparse
//! pass, more likely where a larger error is expected: these queries need exact attention most, and estimates from such a draw
//! vary less.

use std::ops::Range;

mod expected;
mod stats;

pub(crate) use expected::{PrefixScore, expected_mass, sampled_keys};
pub use stats::ProbeStats;
pub(crate) use stats::Repeated;

/// Cuts the rows of a segment, the first of which is at `position`, into runs with one probe each: at multiples of
/// `stride` of the absolute position, so that chunks and whole prompts have the same runs.
///
/// # Panics
/// If `stride` is 0.
pub fn probe_runs(rows: Range<usize>, position: usize, stride: usize) -> impl Iterator<Item = Range<usize>> {
    let (offset, end) = (position - rows.start, position + rows.len());
    let runs = if rows.is_empty() { 0..0 } else { position / stride..end.div_ceil(stride) };
    runs.map(move |run| (run * stride).max(position) - offset..((run + 1) * stride).min(end) - offset)
}

/// Share of the probability that all queries of a run have alike. The rest is in proportion to the expected error.
/// Without it, an error that nothing foretells would never be met.
const EVEN_SHARE: f64 = 0.25;

/// The probe of a run, and the number of queries that it stands for: the inverse of its probability. `expected` has the
/// expected size of each query's error: expected mass times norm of the output, 0 if it saw every key. The choice is
/// pseudo-random; it depends on the run and on `in_group`, the number of the query head in its group (that of one KV
/// head), and on nothing else. With the number of the head in the call, the result would depend on the other heads of
/// the call, and differ between one GPU and several that share the heads.
pub(crate) fn choose(expected: impl Iterator<Item = f64> + Clone, run: usize, in_group: usize) -> (usize, f64) {
    let finite = expected.map(|size| if size.is_finite() { size } else { 0.0 });
    let (total, count) = finite.clone().fold((0.0, 0), |(total, count), size| (total + size, count + 1));
    let even = if total > 0.0 { EVEN_SHARE } else { 1.0 } / f64::from(count);
    let probability = |size: f64| even + if total > 0.0 { (1.0 - EVEN_SHARE) * size / total } else { 0.0 };
    // 53 bits, in [0, 1).
    let mut left = (mixed(run as u64 ^ (in_group as u64) << 32) >> 11) as f64 / (1u64 << 53) as f64;
    let mut chosen = (0, 1.0);
    for (i, size) in finite.enumerate() {
        chosen = (i, 1.0 / probability(size));
        left -= probability(size);
        if left < 0.0 {
            break;
        }
    }
    chosen
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn mixed(index: u64) -> u64 {
    let z = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A probe: the results of the sparse pass and of exact attention for one query.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Probe {
    /// Output over the visited keys.
    pub(crate) out: Vec<f64>,
    /// The [`expected_mass`] of the skipped keys; `None` if the query saw every key.
    pub(crate) expected: Option<f64>,
    /// Output over all keys.
    pub(crate) exact: Vec<f64>,
    /// Share of the softmax mass that the sparse pass skipped.
    pub(crate) skipped: f64,
    /// Number of keys that were scored for `exact`.
    pub(crate) keys: usize,
    /// Number of queries that the probe stands for.
    pub(crate) weight: f64,
}

impl Probe {
    /// A query that skipped some of the `keys` before and at its position. `visited` and `all` are the logarithms of
    /// its sums of `exp(score)` over the visited and over all keys.
    pub(crate) fn skipping(
        (out, visited): (Vec<f64>, f64),
        expected: f64,
        (exact, all): (Vec<f64>, f64),
        keys: usize,
        weight: f64,
    ) -> Self {
        // Rounding must not make mass negative. This form propagates NaN.
        let skipped = -(visited - all).exp_m1();
        let skipped = if skipped < 0.0 { 0.0 } else { skipped };
        Self { out, expected: Some(expected), exact, skipped, keys, weight }
    }

    /// A query that saw every key.
    pub(crate) fn complete(out: Vec<f64>, weight: f64) -> Self {
        Self { exact: out.clone(), out, expected: None, skipped: 0.0, keys: 0, weight }
    }

    /// The skipped keys' part of the exact output.
    fn tail(&self) -> impl Iterator<Item = f64> {
        self.exact.iter().zip(&self.out).map(|(exact, out)| exact - (1.0 - self.skipped) * out)
    }

    /// NaN in a probe must not reach queries that do not see it.
    fn is_finite(&self) -> bool {
        self.skipped.is_finite() && self.exact.iter().chain(&self.out).all(|x| x.is_finite())
    }
}

/// The skipped keys of a segment's queries, as its probes saw them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tail {
    /// Mean value vector.
    pub(crate) value: Vec<f64>,
    /// Skipped mass over its expectation.
    per_expected: f64,
}

impl Tail {
    /// The common tail of finite probes; `None` if they skipped nothing.
    pub(crate) fn of<'p>(probes: impl IntoIterator<Item = &'p Probe>) -> Option<Self> {
        let (mut skipped, mut expected, mut value) = (0.0, 0.0, Vec::new());
        for probe in probes {
            skipped += probe.weight * probe.skipped;
            expected += probe.weight * probe.expected.unwrap_or(0.0) * (1.0 - probe.skipped);
            value.resize(probe.out.len(), 0.0);
            value.iter_mut().zip(probe.tail()).for_each(|(sum, tail)| *sum += probe.weight * tail);
        }
        let per_expected = skipped / expected;
        // As f32 too: the other paths compute in it.
        if !(skipped > 0.0 && (per_expected as f32).is_finite()) {
            return None;
        }
        value.iter_mut().for_each(|sum| *sum /= skipped);
        Some(Self { value, per_expected })
    }

    /// Estimate of a query's skipped mass, relative to its visited mass.
    pub(crate) fn mass(&self, expected: f64) -> f64 {
        self.per_expected * expected
    }

    /// The output of a query with the skipped keys added.
    pub(crate) fn corrected(&self, out: &[f64], expected: f64) -> Vec<f64> {
        let mass = self.mass(expected);
        out.iter().zip(&self.value).map(|(o, u)| (o + mass * u) / (1.0 + mass)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_at_absolute_positions() {
        let runs = |rows, position, stride| probe_runs(rows, position, stride).collect::<Vec<_>>();
        assert_eq!(runs(10..40, 110, 16), [10..12, 12..28, 28..40]);
        assert_eq!(runs(0..32, 64, 16), [0..16, 16..32]);
        assert_eq!(runs(3..5, 103, 1), [3..4, 4..5]);
        assert_eq!(runs(3..5, 103, 500), std::slice::from_ref(&(3..5)));
        assert_eq!(runs(7..7, 107, 16), []);
    }

    #[test]
    fn queries_are_chosen_as_often_as_they_count() {
        let draws = 20_000;
        let expected = [0.0, 3.0, f64::NAN, 1.0];
        let mut counts = [0.0; 4];
        let mut stands_for = [0.0; 4];
        for draw in 0..draws {
            let (chosen, weight) = choose(expected.into_iter(), draw % 200, draw / 200);
            counts[chosen] += 1.0 / f64::from(draws as u32);
            stands_for[chosen] = weight;
        }
        let even = EVEN_SHARE / 4.0;
        for (i, share) in [0.0, 0.75, 0.0, 0.25].into_iter().enumerate() {
            let probability = even + (1.0 - EVEN_SHARE) * share;
            assert!((stands_for[i] * probability - 1.0).abs() < 1e-12, "{stands_for:?}");
            assert!((counts[i] - probability).abs() < 0.01, "{counts:?}");
        }
        let (_, weight) = choose([0.0; 64].into_iter(), 5, 3);
        assert!((weight - 64.0).abs() < 1e-9);
    }

    #[test]
    fn draws_are_those_of_splitmix64() {
        // The first numbers of the generator with seed 0.
        assert_eq!([0, 1].map(mixed), [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn a_tail_is_the_sum_over_the_probes() {
        let probe = |out, expected, exact, skipped| Probe {
            out: vec![out],
            expected: Some(expected),
            exact: vec![exact],
            skipped,
            keys: 1,
            weight: 2.0,
        };
        let probes = [probe(1.0, 0.1, 3.0, 0.5), probe(1.0, 0.2, 2.0, 0.25), Probe::complete(vec![9.0], 2.0)];
        // (2.5 + 1.25) / 0.75, and 0.75 / (0.1 * 0.5 + 0.2 * 0.75).
        let tail = Tail::of(&probes).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        near(tail.value[0], 5.0);
        near(tail.mass(0.2), 0.75);
        near(tail.corrected(&[1.0], 0.8)[0], (1.0 + 3.0 * 5.0) / 4.0);
        // Without skipped mass, or where none is expected, nothing follows.
        for nothing in
            [probe(1.0, 0.1, 1.0, 0.0), probe(1.0, 0.0, 3.0, 0.5), probe(1.0, 1e-40, 3.0, 0.5), probes[2].clone()]
        {
            assert_eq!(Tail::of([&nothing]), None);
        }
    }

    #[test]
    fn skipped_mass_is_never_negative() {
        let skipped = |visited, all| Probe::skipping((vec![1.0], visited), 0.1, (vec![1.0], all), 1, 1.0).skipped;
        assert!((skipped(0.25f64.ln(), 0.0) - 0.75).abs() < 1e-12);
        assert_eq!(skipped(1e-7, 0.0), 0.0);
        assert!(skipped(f64::NAN, 0.0).is_nan());
    }
}
