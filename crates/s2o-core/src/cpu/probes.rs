//! Exact attention of the probes, and the correction of the other queries of their segment.

use std::collections::BTreeMap;
use std::ops::Range;

use super::microkernel::OutputRows;
use super::moments::Moments;
use super::pass1::pass1;
use super::strided::{Element, Inputs};
use super::tile::{QueryTile, Workspace};
use crate::config::S2oConfig;
use crate::plan::Plan;
use crate::probes::{PrefixScore, Probe, ProbeStats, Tail, choose, expected_mass, probe_runs, sampled_keys};
use crate::shape::Mask;

/// A query outside the dense tail after the sparse pass.
#[derive(Debug, Clone, Copy)]
struct SparseRow {
    /// Row of the call.
    row: u32,
    /// Over the visited keys. In f32 its rounding would show in the mass of the skipped keys, a small difference.
    log_sum_exp: f64,
    /// Expected mass of the skipped keys; `None` if it saw every key.
    expected: Option<f32>,
    /// L2 norm of the output.
    norm: f32,
}

/// The queries of one segment and head outside the dense tail, or some of them, after the sparse pass.
#[derive(Debug, Default)]
pub(super) struct SparseRows(Vec<SparseRow>);

impl SparseRows {
    /// Adds the row in a lane of a query tile with its output, and with its query if it skipped keys.
    pub(super) fn add(&mut self, tile: &QueryTile, lane: usize, query: Option<(&PrefixScore, &[f32])>, out: &[f32]) {
        let log_sum_exp = tile.log_sum_exp(lane);
        let score = |(keys, query): (&PrefixScore, &[f32])| keys.of(query.iter().copied().map(f64::from));
        self.0.push(SparseRow {
            row: tile.rows[lane] as u32,
            log_sum_exp,
            expected: query.map(|query| expected_mass(score(query), log_sum_exp) as f32),
            norm: out.iter().map(|x| x * x).sum::<f32>().sqrt(),
        });
    }

    pub(super) fn append(&mut self, mut more: Self) {
        self.0.append(&mut more.0);
    }
}

/// The keys before position `prefix_len` of a sequence and KV head.
pub(super) fn prefix_score<T: Element>(inputs: &Inputs<'_, T>, at: (usize, usize), prefix_len: usize) -> PrefixScore {
    let (head_dim, positions) = (inputs.shape.head_dim(), sampled_keys(prefix_len));
    let mut keys = vec![0.0; positions.len() * head_dim];
    let mut moments = Moments::new(head_dim);
    inputs.k.gather(at, positions, &mut keys).chunks_exact(head_dim).for_each(|key| moments.add(key));
    PrefixScore::new(moments.finish(), inputs.scale)
}

/// The rows of a head and segment, and its probes after the sparse pass.
struct Unit {
    /// Head, and segment of the plan.
    place: [usize; 2],
    rows: Vec<SparseRow>,
    probes: Vec<SparseProbe>,
}

/// A probe after the sparse pass.
struct SparseProbe {
    row: SparseRow,
    /// Number of queries that it stands for.
    weight: f64,
    /// (head_dim)
    out: Vec<f32>,
}

impl Unit {
    /// Rows of the probes that skipped keys.
    fn skipping_probes(&self) -> impl Iterator<Item = usize> {
        self.probes.iter().filter(|probe| probe.row.expected.is_some()).map(|probe| probe.row.row as usize)
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
        let output = |row: SparseRow| inputs.output_row(batch, row.row as usize, head);
        let (mut probes, mut outputs) = (Vec::new(), Vec::new());
        for SparseProbe { row, weight, out } in self.probes {
            let out = widen(&out);
            probes.push(match row.expected {
                None => Probe::complete(out, weight),
                Some(expected) => {
                    let (all, exact) = exact.next().expect("one for each probe that skipped keys");
                    let keys = inputs.shape.q_offset() + row.row as usize + 1;
                    let sparse = (out, row.log_sum_exp);
                    let probe = Probe::skipping(sparse, expected.into(), (widen(&exact), all), keys, weight);
                    outputs.push((output(row), exact));
                    probe
                }
            });
        }
        let (stats, tail) = ProbeStats::measure(segment, self.rows.len(), &probes, config);
        let tail = tail.map(|tail| {
            let rows = self.rows.into_iter().filter_map(|row| Some((output(row), row.expected?)));
            // Probes have their exact outputs, in ascending order.
            (tail, rows.filter(|(row, _)| outputs.binary_search_by_key(row, |(at, _)| *at).is_err()).collect())
        });
        Correction { exact: outputs, tail, stats }
    }
}

/// Number of probes that are computed in one tile. More share the keys, but see fewer of them in vain.
const TILE: usize = 32;

/// The heads of one KV head in consecutive segments: their probes are computed together.
pub(super) struct ProbeRun {
    batch: usize,
    kv_head: usize,
    /// Ascending.
    units: Vec<Unit>,
}

impl ProbeRun {
    /// Chooses the probes of heads (`b * num_heads + h`) and segments, and cuts them into runs. `out` has the outputs
    /// of the `rows`.
    pub(super) fn cut<T: Element>(
        inputs: &Inputs<'_, T>,
        plan: &Plan,
        stride: usize,
        rows: BTreeMap<[usize; 2], SparseRows>,
        out: &mut OutputRows<'_, T>,
    ) -> Vec<Self> {
        let shape = &inputs.shape;
        let segments = (TILE / plan.segment_len.div_ceil(stride)).max(1);
        let mut runs: BTreeMap<[usize; 3], Self> = BTreeMap::new();
        for ([number, segment], SparseRows(mut rows)) in rows {
            // Permuted queries are in another order.
            rows.sort_by_key(|row| row.row);
            let (batch, head) = (number / shape.num_heads(), number % shape.num_heads());
            let first = rows.first().map_or(0, |row| shape.q_offset() + row.row as usize);
            let probe = |run: Range<usize>| {
                let size = |row: &SparseRow| f64::from(row.norm) * f64::from(row.expected.unwrap_or(0.0));
                let (chosen, weight) =
                    choose(rows[run.clone()].iter().map(size), (first + run.start) / stride, head % shape.group_size());
                let row = rows[run.start + chosen];
                let mut values = vec![0.0; shape.head_dim()];
                T::widen(out.row(inputs.output_row(batch, row.row as usize, head)), &mut values);
                SparseProbe { row, weight, out: values }
            };
            let probes = probe_runs(0..rows.len(), first, stride).map(probe).collect();
            let kv_head = shape.kv_head(head);
            let run = runs.entry([batch, kv_head, segment / segments]);
            let run = run.or_insert_with(|| Self { batch, kv_head, units: Vec::new() });
            run.units.push(Unit { place: [head, segment], rows, probes });
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
        for of_head in units.chunk_by(|a, b| a.place[0] == b.place[0]) {
            let mut rows = of_head.iter().flat_map(Unit::skipping_probes).peekable();
            if rows.peek().is_some() {
                count += 1;
                let tile = &mut Workspace::at_least(&mut workspace.tiles, count)[count - 1];
                tile.load(inputs, (batch, of_head[0].place[0]), rows, &mut workspace.rows);
            }
        }
        pass1(inputs, (batch, kv_head), 0, Mask::Causal, config.tile_k(), workspace, count);
        let mut exact = Vec::new();
        for tile in &workspace.tiles[..count] {
            tile.finish(&mut workspace.rows, |lane, out| exact.push((tile.log_sum_exp(lane), out.to_vec())));
        }
        let mut exact = exact.into_iter();
        let correction = |unit: Unit| {
            let [head, segment] = unit.place;
            let number = plan.segments[segment].index;
            let place = [batch * inputs.shape.num_heads() + head, segment];
            (place, unit.correction(inputs, (batch, head), number, config, &mut exact))
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
    /// The common tail, and the output row and expected mass of each query that gets it.
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
        for &(row, expected) in rows {
            let mass = tail.mass(expected.into());
            let (keep, add) = ((1.0 / (1.0 + mass)) as f32, (mass / (1.0 + mass)) as f32);
            out.write(row, |dst| {
                T::widen(dst, values);
                values.iter_mut().zip(&value).for_each(|(x, u)| *x = *x * keep + u * add);
                T::narrow(values, dst);
            });
        }
    }
}
