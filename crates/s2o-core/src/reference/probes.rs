use super::{Head, SparseRow, exact};
use crate::config::S2oConfig;
use crate::probes::{Probe, ProbeStats, is_probe};
use crate::segment::Segment;

/// Corrects the outputs `out` of a segment's rows if that helps, and measures the error. Probes get their exact
/// outputs, and rows that saw every key keep theirs.
pub(super) fn correct(
    head: &Head,
    segment: &Segment,
    rows: &[SparseRow],
    stride: usize,
    config: &S2oConfig,
    out: &mut [Vec<f64>],
) -> ProbeStats {
    let is_own = |i: &usize| is_probe(head.position(segment.rows.start + i), stride);
    let own: Vec<usize> = (0..rows.len()).filter(is_own).collect();
    let probe = |&i: &usize| match rows[i].last_gain {
        None => Probe::complete(out[i].clone()),
        Some(gain) => {
            let state = &rows[i].state;
            let sparse = (out[i].clone(), state.row_max + state.row_sum.ln());
            let row = segment.rows.start + i;
            Probe::skipping(sparse, gain, exact(head, row), head.position(row) + 1)
        }
    };
    let probes: Vec<Probe> = own.iter().map(probe).collect();
    let (stats, tail) = ProbeStats::measure(segment.index, &probes, config);
    if let Some(tail) = tail {
        for (row, out) in rows.iter().zip(out.iter_mut()) {
            if let Some(gain) = row.last_gain {
                *out = tail.corrected(out, gain);
            }
        }
    }
    own.iter().zip(&probes).for_each(|(&i, probe)| out[i].clone_from(&probe.exact));
    stats
}
