//! [`Call`]: cuts segment groups into runs of query tiles, distributes the runs over the workers, and orders their
//! visited tiles.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;

use super::microkernel::OutputRows;
use super::probes::{Correction, ProbeRun, SparseRows};
use super::segment_group::SegmentHeads;
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use super::tile_run::{TileRun, tiles_per_run};
use crate::config::S2oConfig;
use crate::error_control::ErrorControl;
use crate::plan::{Plan, SegmentOrder};
use crate::probes::{ProbeStats, Repeated};
use crate::segment::query_tiles;
use crate::stats::AttnStats;

/// Heads (`b * num_heads + h`) and segments of the plan.
type Units = BTreeMap<[usize; 2], Repeated>;

/// One attention call, with its output and the statistics of the finished tiles.
pub(super) struct Call<'a, T> {
    inputs: &'a Inputs<'a, T>,
    plan: &'a Plan,
    config: &'a S2oConfig,
    /// The dense tail, until the first group takes it along.
    tail: Vec<TileRun<'a>>,
    out: OutputRows<'a, T>,
    /// The visited prefix tiles of each ranked run, by its head (`b * num_heads + h`), segment of the plan and first
    /// row.
    done: BTreeMap<[usize; 3], Vec<usize>>,
    /// The measurement of each head and segment of the plan.
    measured: Vec<([usize; 2], ProbeStats)>,
}

impl<'a, T: Element> Call<'a, T> {
    pub(super) fn new(inputs: &'a Inputs<'a, T>, plan: &'a Plan, config: &'a S2oConfig, out: &'a mut [T]) -> Self {
        let num_heads = inputs.shape.num_heads();
        let mut tail = Vec::new();
        for head in 0..inputs.shape.batch() * num_heads {
            let (batch, head) = (head / num_heads, head % num_heads);
            for segment in &plan.segments {
                let tiles = query_tiles(segment.tail_rows.clone(), config.tile_q());
                tail.extend(tiles.map(|tile| TileRun { batch, head, segment, tiles: vec![tile], order: None }));
            }
        }
        let out = OutputRows::new(out, inputs.shape.head_dim());
        Self { inputs, plan, config, tail, out, done: BTreeMap::new(), measured: Vec::new() }
    }

    /// Computes a group. `order(i, g)` returns the order of `group[i]` for the `g`-th of its heads.
    pub(super) fn run<'o>(&mut self, group: &[SegmentHeads], order: impl Fn(usize, usize) -> &'o SegmentOrder)
    where
        'a: 'o,
    {
        let num_heads = self.inputs.shape.num_heads();
        let mut units = BTreeMap::new();
        for (i, SegmentHeads { batch, heads, segment }) in group.iter().enumerate() {
            for (g, head) in heads.clone().enumerate() {
                units.insert([batch * num_heads + head, *segment], order(i, g));
            }
        }
        let control = ErrorControl::new(self.config, self.plan);
        // The heads and segments of each pass, with what earlier passes did.
        let mut passes: [Units; ErrorControl::PASSES] = Default::default();
        passes[0] = units.keys().map(|&place| (place, Repeated::default())).collect();
        for pass in 0..ErrorControl::PASSES {
            let of_pass = std::mem::take(&mut passes[pass]);
            let config = control.config(pass);
            let mut runs: Vec<TileRun<'o>> = std::mem::take(&mut self.tail);
            runs.extend(of_pass.keys().flat_map(|place| self.runs(*place, units[place])));
            let rows = self.compute(runs, config);
            for (place, stats) in self.correct(rows, config, |stats| control.next(pass, stats).is_none()) {
                let mut repeated = of_pass[&place];
                let Some(next) = control.next(pass, &stats) else {
                    self.measured.push((place, stats.replacing(repeated)));
                    continue;
                };
                repeated.add(self.reopen(place), &stats);
                passes[next].insert(place, repeated);
            }
        }
    }

    /// The runs of a head and segment of the plan outside the dense tail.
    fn runs<'o>(&self, [head, segment]: [usize; 2], order: &'o SegmentOrder) -> Vec<TileRun<'o>>
    where
        'a: 'o,
    {
        let Self { inputs, plan, config, .. } = *self;
        let (shape, tile_q) = (inputs.shape, config.tile_q());
        let total_tiles = shape.batch() * shape.num_heads() * shape.q_len().div_ceil(tile_q);
        let segment = &plan.segments[segment];
        let tiles = segment.ranked_tiles(shape.q_offset(), config);
        // A permuted tile has rows from the whole segment, so the segment is not split.
        let per_run = if config.q_perm() { tiles.len() } else { tiles_per_run(shape.head_dim(), tile_q, total_tiles) };
        let (batch, head) = (head / shape.num_heads(), head % shape.num_heads());
        let run = |tiles: &[_]| TileRun { batch, head, segment, tiles: tiles.to_vec(), order: Some(order) };
        tiles.chunks(per_run.max(1)).map(run).collect()
    }

    /// Computes runs. With probes, the result has the rows of each head and segment of the plan outside the dense tail.
    fn compute(&mut self, mut runs: Vec<TileRun<'_>>, config: &S2oConfig) -> BTreeMap<[usize; 2], SparseRows> {
        let Self { inputs, plan, .. } = *self;
        let shape = inputs.shape;
        // The tiles of the dense tail come first because they see every key.
        runs.sort_by_key(|run| (run.order.is_some(), Reverse(run.segment.start)));
        let out = &self.out;
        let done = runs.into_iter().par_bridge().map_init(
            || None,
            |held, run| {
                let workspace = Workspace::held(held, shape.head_dim(), config.tile_k());
                let segment = run.segment.index - plan.segments[0].index;
                let place = [run.batch * shape.num_heads() + run.head, segment, run.tiles[0].start];
                let (visited, rows) = run.compute(inputs, config, plan.probe_stride.is_some(), workspace, out);
                (place, run.order.is_some(), visited, rows)
            },
        );
        let mut done: Vec<_> = done.collect();
        let mut rows: BTreeMap<[usize; 2], SparseRows> = BTreeMap::new();
        done.sort_by_key(|&(place, ..)| place);
        for (place, is_ranked, visited, part) in done {
            self.done.insert(place, visited);
            if is_ranked && plan.probe_stride.is_some() {
                rows.entry([place[0], place[1]]).or_default().append(part);
            }
        }
        rows
    }

    /// Measures each head and segment by its probes, and corrects the rows of those that `is_final` accepts.
    fn correct(
        &mut self,
        rows: BTreeMap<[usize; 2], SparseRows>,
        config: &S2oConfig,
        is_final: impl Fn(&ProbeStats) -> bool,
    ) -> Vec<([usize; 2], ProbeStats)> {
        let Self { inputs, plan, .. } = *self;
        let Some(stride) = plan.probe_stride else { return Vec::new() };
        let runs = ProbeRun::cut(inputs, plan, stride, rows, &mut self.out).into_par_iter();
        let corrections = runs.map_init(
            || None,
            |held, run| {
                let workspace = Workspace::held(held, inputs.shape.head_dim(), config.tile_k());
                run.corrections(inputs, plan, config, workspace)
            },
        );
        let corrections: Vec<_> = corrections.flatten_iter().collect();
        let accepted: Vec<&Correction> =
            corrections.iter().map(|(_, correction)| correction).filter(|of| is_final(&of.stats)).collect();
        accepted.iter().for_each(|correction| correction.open(&mut self.out));
        let out = &self.out;
        accepted.par_iter().for_each_init(
            || vec![0.0; inputs.shape.head_dim()],
            |row_buffer, correction| correction.apply(out, row_buffer),
        );
        corrections.into_iter().map(|(place, correction)| (place, correction.stats)).collect()
    }

    /// Lets the rows of a head and segment of the plan be computed again, and returns the number of its computed tiles.
    fn reopen(&mut self, [head, segment]: [usize; 2]) -> usize {
        let Self { inputs, plan, config, .. } = *self;
        let shape = inputs.shape;
        let Range { start, end } = plan.segments[segment].rows.clone();
        let runs = self.done.range([head, segment, start]..[head, segment, end]);
        // The same runs will be done again.
        let visited: Vec<usize> = runs.flat_map(|(_, visited)| visited).copied().collect();
        for row in plan.segments[segment].rows.clone() {
            self.out.reopen(inputs.output_row(head / shape.num_heads(), row, head % shape.num_heads()));
        }
        plan.segments[segment].computed_tiles(&visited, shape.q_offset(), config)
    }

    /// The statistics of the call, after all groups are done.
    pub(super) fn finish(mut self) -> AttnStats {
        assert!(self.out.is_complete());
        let shape = self.inputs.shape;
        let heads = shape.batch() * shape.num_heads();
        let mut visited = vec![vec![Vec::new(); self.plan.segments.len()]; heads];
        for ([head, segment, _], of_run) in self.done {
            visited[head][segment].extend(of_run);
        }
        let mut measured = vec![Vec::new(); heads];
        self.measured.sort_by_key(|(place, _)| *place);
        self.measured.into_iter().for_each(|([head, _], stats)| measured[head].push(stats));
        self.plan.stats(&shape, self.config, |head, segment, tile| visited[head][segment][tile], measured)
    }
}
