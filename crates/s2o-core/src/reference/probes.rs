//! Exact probe queries: exact attention for a few queries of each segment corrects the others for the keys that they
//! skipped, and measures the error that remains.
//!
//! The keys that the queries of a segment skip have a common mean value, and their mass follows from the gain of the
//! last visited tile. Delta Attention (arXiv 2505.11254) also computes every n-th query exactly, and adds the difference
//! of its output to its neighbours.

use super::{Head, SparseRow, exact};
use crate::probes::is_probe;
use crate::segment::Segment;
use crate::stats::AttnStats;

/// How the mass of a query's skipped keys is estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TailMass {
    /// In proportion to the gain of its last tile.
    LastGain,
    /// The geometric mean of that and of the probes' mean. It varies less if there are few probes.
    GeometricMean,
}

/// Which queries are probes, and how they correct the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probes {
    /// One query in so many positions is a probe; at least 1.
    pub stride: usize,
    /// The estimate of the skipped mass.
    pub tail_mass: TailMass,
}

/// What the probes of one head and segment measured. Sums are over the probes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measured {
    /// Number of probes outside the dense tail.
    pub probes: usize,
    /// Sum of squared L2 norms of the exact outputs.
    pub norm: f64,
    /// Sum of squared L2 errors of the outputs before the correction.
    pub uncorrected: f64,
    /// Sum of squared L2 errors of outputs that the other probes correct (leave one out). With fewer than two probes
    /// it is the uncorrected error.
    pub corrected: f64,
    /// Sum of the softmax mass that the probes skipped.
    pub skipped_mass: f64,
}

impl Measured {
    /// Relative L2 error of the corrected outputs; 0 without probes.
    pub fn relative_error(&self) -> f64 {
        if self.norm > 0.0 { (self.corrected / self.norm).sqrt() } else { 0.0 }
    }
}

/// The result of [`super::attention_with_probes`].
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// The output (batch, q_len, num_heads, head_dim).
    pub out: Vec<f64>,
    /// The statistics of the sparse pass. They do not count the probes' work.
    pub stats: AttnStats,
    /// What the probes measured, for each head (`b * num_heads + h`) and segment; no segments if the call is dense.
    pub measured: Vec<Vec<Measured>>,
}

/// The skipped keys of a segment's queries, as its probes saw them.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail {
    /// Mean value vector.
    pub value: Vec<f64>,
    /// Skipped mass per unit of the last gain, both relative to the visited mass.
    pub per_gain: f64,
    /// Mean skipped mass over mean visited mass.
    pub odds: f64,
}

impl Tail {
    /// A query's skipped mass, relative to its visited mass.
    pub fn mass(&self, last_gain: f64, tail_mass: TailMass) -> f64 {
        let by_gain = self.per_gain * last_gain;
        match tail_mass {
            TailMass::LastGain => by_gain,
            TailMass::GeometricMean => (self.odds * by_gain).sqrt(),
        }
    }

    /// The output of a query with the skipped keys added.
    fn corrected(&self, row: &SparseRow, tail_mass: TailMass) -> Vec<f64> {
        let out = row.state.finish();
        let Some(last_gain) = row.last_gain else { return out };
        let mass = self.mass(last_gain, tail_mass);
        out.iter().zip(&self.value).map(|(o, u)| (o + mass * u) / (1.0 + mass)).collect()
    }
}

/// A probe: a row of its segment with its exact output.
struct Probe<'r> {
    index: usize,
    row: &'r SparseRow,
    exact: Vec<f64>,
    /// Share of the softmax mass that the sparse row skipped.
    skipped: f64,
}

impl<'r> Probe<'r> {
    fn new(head: &Head, segment: &Segment, index: usize, row: &'r SparseRow) -> Self {
        let (out, lse) = exact(head, segment.rows.start + index);
        let visited = row.state.row_max + row.state.row_sum.ln();
        // Rounding must not make mass negative.
        let skipped = if row.last_gain.is_some() { (-(visited - lse).exp_m1()).max(0.0) } else { 0.0 };
        Self { index, row, exact: out, skipped }
    }

    /// The skipped keys' part of the exact output.
    fn tail(&self) -> impl Iterator<Item = f64> {
        let visited = 1.0 - self.skipped;
        self.exact.iter().zip(self.row.state.finish()).map(move |(exact, out)| exact - visited * out)
    }

    /// NaN in a probe must not reach queries that do not see it.
    fn is_finite(&self) -> bool {
        self.skipped.is_finite()
            && self.row.last_gain.is_none_or(f64::is_finite)
            && self.exact.iter().chain(&self.row.state.finish()).all(|x| x.is_finite())
    }
}

/// The common tail of some probes; `None` if they skipped nothing.
fn common_tail<'p>(probes: impl Iterator<Item = &'p Probe<'p>>, head_dim: usize) -> Option<Tail> {
    let (mut count, mut skipped, mut gain, mut value) = (0.0, 0.0, 0.0, vec![0.0; head_dim]);
    for probe in probes.filter(|probe| probe.is_finite()) {
        count += 1.0;
        skipped += probe.skipped;
        gain += probe.row.last_gain.unwrap_or(0.0) * (1.0 - probe.skipped);
        value.iter_mut().zip(probe.tail()).for_each(|(sum, tail)| *sum += tail);
    }
    if !(skipped > 0.0 && gain > 0.0 && skipped < count) {
        return None;
    }
    value.iter_mut().for_each(|sum| *sum /= skipped);
    Some(Tail { value, per_gain: skipped / gain, odds: skipped / (count - skipped) })
}

impl Probes {
    /// The corrected outputs (rows, head_dim) of a segment's rows, and the measurement. Probes get their exact outputs, and
    /// rows that saw every key keep theirs.
    pub(super) fn correct(&self, head: &Head, segment: &Segment, rows: &[SparseRow]) -> (Vec<f64>, Measured) {
        let is_own = |index: &usize| is_probe(head.position(segment.rows.start + index), self.stride);
        let probes: Vec<Probe> =
            (0..rows.len()).filter(is_own).map(|index| Probe::new(head, segment, index, &rows[index])).collect();
        let all = common_tail(probes.iter(), head.head_dim);
        let correct = |tail: &Option<Tail>, row: &SparseRow| match tail {
            Some(tail) => tail.corrected(row, self.tail_mass),
            None => row.state.finish(),
        };
        let mut out: Vec<f64> = rows.iter().flat_map(|row| correct(&all, row)).collect();
        let mut measured = Measured { probes: probes.len(), ..Measured::default() };
        for (i, probe) in probes.iter().enumerate() {
            let others = probes.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, other)| other);
            let predicted = correct(&common_tail(others, head.head_dim), probe.row);
            measured.norm += probe.exact.iter().map(|x| x * x).sum::<f64>();
            measured.uncorrected += squared_distance(&probe.row.state.finish(), &probe.exact);
            measured.corrected += squared_distance(&predicted, &probe.exact);
            measured.skipped_mass += probe.skipped;
            out[probe.index * head.head_dim..][..head.head_dim].copy_from_slice(&probe.exact);
        }
        (out, measured)
    }
}

fn squared_distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online_softmax::SoftmaxState;

    /// A row whose output over the visited keys is `out`.
    fn row(out: f64, last_gain: Option<f64>) -> SparseRow {
        SparseRow { state: SoftmaxState { row_max: 2.0, row_sum: 4.0, acc: vec![4.0 * out] }, last_gain }
    }

    #[test]
    fn a_tail_is_the_sum_over_the_probes() {
        let rows = [row(1.0, Some(0.1)), row(1.0, Some(0.2)), row(9.0, None), row(f64::NAN, Some(0.1))];
        let probes = [(3.0, 0.5), (2.0, 0.25), (9.0, 0.0), (1.0, 0.5)];
        let probe = |(row, (exact, skipped))| Probe { index: 0, row, exact: vec![exact], skipped };
        let probes: Vec<Probe> = rows.iter().zip(probes).map(probe).collect();
        // (2.5 + 1.25) / 0.75, 0.75 / (0.1 * 0.5 + 0.2 * 0.75) and 0.75 / (3 - 0.75); the probe with NaN does not count.
        let tail = common_tail(probes.iter(), 1).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        near(tail.value[0], 5.0);
        near(tail.per_gain, 3.75);
        near(tail.odds, 1.0 / 3.0);
        near(tail.mass(0.1, TailMass::LastGain), 0.375);
        near(tail.mass(0.1, TailMass::GeometricMean), 0.125f64.sqrt());
        near(tail.corrected(&row(1.0, Some(0.4)), TailMass::LastGain)[0], (1.0 + 1.5 * 5.0) / 2.5);
        near(tail.corrected(&row(1.0, None), TailMass::LastGain)[0], 1.0);
        assert_eq!(common_tail(probes[2..].iter(), 1), None);
    }
}
