use super::ranking::moments;
use super::{Head, SparseRow, exact};
use crate::config::S2oConfig;
use crate::probes::{PrefixScore, Probe, ProbeStats, choose, expected_mass, probe_runs, sampled_keys};
use crate::segment::Segment;

/// Corrects the outputs `out` of a segment's rows if that helps, and measures the error. Probes get their exact
/// outputs, and rows that saw every key keep theirs. `in_group` is the number of the head among those of its KV head.
pub(super) fn correct(
    (head, in_group): (&Head, usize),
    segment: &Segment,
    rows: &[SparseRow],
    stride: usize,
    config: &S2oConfig,
    out: &mut [Vec<f64>],
) -> ProbeStats {
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let first = head.position(segment.rows.start);
    let keys = sampled_keys(segment.start).map(|position| head.k(position));
    let prefix_score = PrefixScore::new(moments(head.head_dim, keys), head.scale);
    let log_sum_exp = |row: &SparseRow| row.state.row_max + row.state.row_sum.ln();
    // Of the rows that skipped keys.
    let expected: Vec<Option<f64>> = rows
        .iter()
        .zip(segment.rows.clone())
        .map(|(row, at)| {
            row.skips.then(|| expected_mass(prefix_score.of(head.q(at).iter().copied()), log_sum_exp(row)))
        })
        .collect();
    let chosen: Vec<(usize, f64)> = probe_runs(0..rows.len(), first, stride)
        .map(|run| {
            let sizes = run.clone().map(|i| expected[i].map_or(0.0, |expected| expected * norm(&out[i])));
            let (chosen, weight) = choose(sizes, (first + run.start) / stride, in_group);
            (run.start + chosen, weight)
        })
        .collect();
    let probe = |&(i, weight): &(usize, f64)| match expected[i] {
        None => Probe::complete(out[i].clone(), weight),
        Some(expected) => {
            let sparse = (out[i].clone(), log_sum_exp(&rows[i]));
            let row = segment.rows.start + i;
            Probe::skipping(sparse, expected, exact(head, row), head.position(row) + 1, weight)
        }
    };
    let probes: Vec<Probe> = chosen.iter().map(probe).collect();
    let (stats, tail) = ProbeStats::measure(segment.index, rows.len(), &probes, config);
    if let Some(tail) = tail {
        for (expected, out) in expected.iter().zip(out.iter_mut()) {
            if let Some(expected) = expected {
                *out = tail.corrected(out, *expected);
            }
        }
    }
    chosen.iter().zip(&probes).for_each(|(&(i, _), probe)| out[i].clone_from(&probe.exact));
    stats
}
