use super::{Head, SparseRow, exact};
use crate::config::S2oConfig;
use crate::probes::{Probe, ProbeStats, choose, probe_runs};
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
    let chosen: Vec<(usize, f64)> = probe_runs(0..rows.len(), first, stride)
        .map(|run| {
            let expected = run.clone().map(|i| rows[i].last_gain.map_or(0.0, |gain| gain * norm(&out[i])));
            let (chosen, weight) = choose(expected, (first + run.start) / stride, in_group);
            (run.start + chosen, weight)
        })
        .collect();
    let probe = |&(i, weight): &(usize, f64)| match rows[i].last_gain {
        None => Probe::complete(out[i].clone(), weight),
        Some(gain) => {
            let state = &rows[i].state;
            let sparse = (out[i].clone(), state.row_max + state.row_sum.ln());
            let row = segment.rows.start + i;
            Probe::skipping(sparse, gain, exact(head, row), head.position(row) + 1, weight)
        }
    };
    let probes: Vec<Probe> = chosen.iter().map(probe).collect();
    let (stats, tail) = ProbeStats::measure(segment.index, rows.len(), &probes, config);
    if let Some(tail) = tail {
        for (row, out) in rows.iter().zip(out.iter_mut()) {
            if let Some(gain) = row.last_gain {
                *out = tail.corrected(out, gain);
            }
        }
    }
    chosen.iter().zip(&probes).for_each(|(&(i, _), probe)| out[i].clone_from(&probe.exact));
    stats
}
