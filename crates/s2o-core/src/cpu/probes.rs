//! Exact attention of the probes, and the correction of the other queries of their segment.

use std::collections::BTreeMap;

use super::microkernel::OutputRows;
use super::pass1::pass1;
use super::strided::{Element, Inputs};
use super::tile::{QueryTile, Workspace};
use crate::config::S2oConfig;
use crate::plan::Plan;
use crate::probes::{Probe, ProbeStats, Tail};
use crate::shape::{AttnShape, Mask};

/// A probe after the sparse pass.
#[derive(Debug)]
struct SparseProbe {
    /// Row of the call.
    row: usize,
    /// Over the visited keys.
    log_sum_exp: f64,
    /// `None` if it saw every key.
    last_gain: Option<f32>,
    /// (head_dim)
    out: Vec<f32>,
}

/// The queries of one segment and head outside the dense tail, or some of them, after the sparse pass.
#[derive(Debug, Default)]
pub(super) struct SparseRows {
    probes: Vec<SparseProbe>,
    /// The other queries that skipped keys: the row of the call, and the gain of the last key tile.
    skipping: Vec<(usize, f32)>,
}

impl SparseRows {
    /// Adds the row in a lane of a query tile: a probe with its output, or another query.
    pub(super) fn add(&mut self, tile: &QueryTile, lane: usize, out_of_probe: Option<&[f32]>) {
        let (row, last_gain) = (tile.rows[lane], tile.last_gain.get(lane).copied());
        if let Some(out) = out_of_probe {
            let log_sum_exp = tile.log_sum_exp(lane);
            self.probes.push(SparseProbe { row, log_sum_exp, last_gain, out: out.to_vec() });
        } else if let Some(gain) = last_gain {
            self.skipping.push((row, gain));
        }
    }

    pub(super) fn append(&mut self, mut more: Self) {
        self.probes.append(&mut more.probes);
        self.skipping.append(&mut more.skipping);
    }

    /// Rows of the probes that skipped keys.
    fn skipping_probes(&self) -> impl Iterator<Item = usize> {
        self.probes.iter().filter(|probe| probe.last_gain.is_some()).map(|probe| probe.row)
    }

    /// `exact` has the log-sum-exp and the output over all keys of each probe that skipped keys.
    fn correction<T: Element>(
        self,
        inputs: &Inputs<'_, T>,
        (batch, head): (usize, usize),
        segment: usize,
        config: &S2oConfig,
        exact: &mut impl Iterator<Item = (f64, Vec<f32>)>,
    ) -> Correction {
        let output = |row| inputs.output_row(batch, row, head);
        let (mut probes, mut outputs) = (Vec::new(), Vec::new());
        for SparseProbe { row, log_sum_exp, last_gain, out } in self.probes {
            let out = widen(&out);
            probes.push(match last_gain {
                None => Probe::complete(out),
                Some(gain) => {
                    let (all, exact) = exact.next().expect("one for each probe that skipped keys");
                    let keys = inputs.shape.q_offset() + row + 1;
                    let probe = Probe::skipping((out, log_sum_exp), gain.into(), (widen(&exact), all), keys);
                    outputs.push((output(row), exact));
                    probe
                }
            });
        }
        let rows = self.skipping.into_iter().map(|(row, gain)| (output(row), gain)).collect();
        let (stats, tail) = ProbeStats::measure(segment, &probes, config);
        Correction { exact: outputs, tail: tail.map(|tail| (tail, rows)), stats }
    }
}

/// Number of probes that are computed in one tile. More share the keys, but see fewer of them in vain.
const TILE: usize = 32;

/// The heads of one KV head in consecutive segments: their probes are computed together.
pub(super) struct ProbeRun {
    batch: usize,
    kv_head: usize,
    /// Head and segment of the plan, ascending, with their rows.
    units: Vec<([usize; 2], SparseRows)>,
}

impl ProbeRun {
    /// Cuts the rows of heads (`b * num_heads + h`) and segments into runs.
    pub(super) fn cut(shape: &AttnShape, plan: &Plan, rows: BTreeMap<[usize; 2], SparseRows>) -> Vec<Self> {
        let in_segment = plan.probe_stride.map_or(1, |stride| plan.segment_len.div_ceil(stride));
        let segments = (TILE / in_segment).max(1);
        let mut runs: BTreeMap<[usize; 3], Self> = BTreeMap::new();
        for (place, mut rows) in rows {
            // Permuted queries are in another order, and the tile loops want ascending rows.
            rows.probes.sort_by_key(|probe| probe.row);
            let (batch, head) = (place[0] / shape.num_heads(), place[0] % shape.num_heads());
            let kv_head = shape.kv_head(head);
            let run = runs.entry([batch, kv_head, place[1] / segments]);
            let run = run.or_insert_with(|| Self { batch, kv_head, units: Vec::new() });
            run.units.push(([head, place[1]], rows));
        }
        runs.into_values().collect()
    }

    /// Computes the probes that skipped keys exactly. The corrections are those of the heads `b * num_heads + h` and
    /// segments of the plan that they come with.
    pub(super) fn corrections<T: Element>(
        self,
        inputs: &Inputs<'_, T>,
        plan: &Plan,
        config: &S2oConfig,
        workspace: &mut Workspace,
    ) -> Vec<([usize; 2], Correction)> {
        let Self { batch, kv_head, units } = self;
        let mut count = 0;
        for of_head in units.chunk_by(|a, b| a.0[0] == b.0[0]) {
            let mut rows = of_head.iter().flat_map(|(_, rows)| rows.skipping_probes()).peekable();
            if rows.peek().is_some() {
                count += 1;
                let tile = &mut Workspace::at_least(&mut workspace.tiles, count)[count - 1];
                tile.load(inputs, (batch, of_head[0].0[0]), rows, &mut workspace.rows);
            }
        }
        pass1(inputs, (batch, kv_head), 0, Mask::Causal, config.tile_k(), workspace, count);
        let mut exact = Vec::new();
        for tile in &workspace.tiles[..count] {
            tile.finish(&mut workspace.rows, |lane, out| exact.push((tile.log_sum_exp(lane), out.to_vec())));
        }
        let mut exact = exact.into_iter();
        let correction = |([head, segment], rows): ([usize; 2], SparseRows)| {
            let number = plan.segments[segment].index;
            let place = [batch * inputs.shape.num_heads() + head, segment];
            (place, rows.correction(inputs, (batch, head), number, config, &mut exact))
        };
        units.into_iter().map(correction).collect()
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// The rows of one segment and head that the probes change.
pub(super) struct Correction {
    /// Output row and output of each probe that skipped keys.
    exact: Vec<(usize, Vec<f32>)>,
    /// The common tail, and the output row and last gain of each query that gets it.
    tail: Option<(Tail, Vec<(usize, f32)>)>,
    pub(super) stats: ProbeStats,
}

impl Correction {
    /// Opens the rows for [`Correction::apply`].
    pub(super) fn open<T>(&self, out: &mut OutputRows<'_, T>) {
        let corrected = self.tail.iter().flat_map(|(_, rows)| rows).map(|&(row, _)| row);
        self.exact.iter().map(|&(row, _)| row).chain(corrected).for_each(|row| out.reopen(row));
    }

    /// Writes the rows.
    pub(super) fn apply<T: Element>(&self, out: &OutputRows<'_, T>, row_buffer: &mut [f32]) {
        for (row, values) in &self.exact {
            out.write(*row, |dst| T::narrow(values, dst));
        }
        let Some((tail, rows)) = &self.tail else { return };
        let value: Vec<f32> = tail.value.iter().map(|&u| u as f32).collect();
        let values = &mut row_buffer[..value.len()];
        for &(row, gain) in rows {
            let mass = tail.mass(gain.into());
            let (keep, add) = ((1.0 / (1.0 + mass)) as f32, (mass / (1.0 + mass)) as f32);
            out.write(row, |dst| {
                T::widen(dst, values);
                values.iter_mut().zip(&value).for_each(|(x, u)| *x = *x * keep + u * add);
                T::narrow(values, dst);
            });
        }
    }
}
