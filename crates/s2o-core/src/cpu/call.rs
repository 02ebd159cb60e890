//! [`Call`]: cuts segment groups into runs of query tiles, distributes the runs over the workers, and orders their
//! visits.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use rayon::prelude::*;

use super::microkernel::OutputRows;
use super::probes::{ProbeRun, SparseRows};
use super::segment_group::SegmentHeads;
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use super::tile_run::{TileRun, tiles_per_run};
use crate::config::S2oConfig;
use crate::plan::{Plan, SegmentOrder};
use crate::probes::ProbeStats;
use crate::segment::query_tiles;
use crate::stats::{AttnStats, Visit};

/// One attention call, with its output and the statistics of the finished tiles.
pub(super) struct Call<'a, T> {
    inputs: &'a Inputs<'a, T>,
    plan: &'a Plan,
    config: &'a S2oConfig,
    /// The dense tail, until the first group takes it along.
    tail: Vec<TileRun<'a>>,
    out: OutputRows<'a, T>,
    /// The visits of each ranked run, after its head (`b * num_heads + h`), segment of the plan and first row.
    done: Vec<([usize; 3], Vec<Visit>)>,
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
        Self { inputs, plan, config, tail, out, done: Vec::new(), measured: Vec::new() }
    }

    /// Computes a group. `order(i, g)` returns the order of `group[i]` for the `g`-th of its heads.
    pub(super) fn run<'o>(&mut self, group: &[SegmentHeads], order: impl Fn(usize, usize) -> &'o SegmentOrder)
    where
        'a: 'o,
    {
        let Self { inputs, plan, config, .. } = *self;
        let (shape, tile_q) = (inputs.shape, config.tile_q());
        let total_tiles = shape.batch() * shape.num_heads() * shape.q_len().div_ceil(tile_q);
        let per_run = tiles_per_run(shape.head_dim(), tile_q, total_tiles);
        let mut runs: Vec<TileRun<'o>> = std::mem::take(&mut self.tail);
        for (i, &SegmentHeads { batch, ref heads, segment }) in group.iter().enumerate() {
            let segment = &plan.segments[segment];
            let tiles = segment.ranked_tiles(shape.q_offset(), config);
            // A permuted tile has rows from the whole segment, so the segment is not split.
            let per_run = if config.q_perm() { tiles.len() } else { per_run };
            for (g, head) in heads.clone().enumerate() {
                runs.extend(tiles.chunks(per_run).map(|tiles| {
                    let (tiles, order) = (tiles.to_vec(), Some(order(i, g)));
                    TileRun { batch, head, segment, tiles, order }
                }));
            }
        }
        // The tiles of the dense tail come first because they see every key.
        runs.sort_by_key(|run| (run.order.is_some(), Reverse(run.segment.start)));
        let out = &self.out;
        let done = runs.into_iter().par_bridge().map_init(
            || None,
            |held, run| {
                let workspace = Workspace::held(held, shape.head_dim(), config.tile_k());
                let segment = run.segment.index - plan.segments[0].index;
                let place = [run.batch * shape.num_heads() + run.head, segment, run.tiles[0].start];
                let (visits, rows) = run.compute(inputs, config, plan.probe_stride, workspace, out);
                (place, run.order.is_some(), visits, rows)
            },
        );
        let mut done: Vec<_> = done.collect();
        let mut rows: BTreeMap<[usize; 2], SparseRows> = BTreeMap::new();
        done.sort_by_key(|&(place, ..)| place);
        for (place, is_ranked, visits, part) in done {
            self.done.push((place, visits));
            if is_ranked && plan.probe_stride.is_some() {
                rows.entry([place[0], place[1]]).or_default().append(part);
            }
        }
        self.correct(rows);
    }

    /// Corrects the rows of each head and segment by their probes.
    fn correct(&mut self, rows: BTreeMap<[usize; 2], SparseRows>) {
        let Self { inputs, plan, config, .. } = *self;
        let runs = ProbeRun::cut(&inputs.shape, plan, rows).into_par_iter();
        let corrections = runs.map_init(
            || None,
            |held, run| {
                let workspace = Workspace::held(held, inputs.shape.head_dim(), config.tile_k());
                run.corrections(inputs, plan, config, workspace)
            },
        );
        let corrections: Vec<_> = corrections.flatten_iter().collect();
        corrections.iter().for_each(|(_, correction)| correction.open(&mut self.out));
        let out = &self.out;
        corrections.par_iter().for_each_init(
            || vec![0.0; inputs.shape.head_dim()],
            |row_buffer, (_, correction)| correction.apply(out, row_buffer),
        );
        self.measured.extend(corrections.into_iter().map(|(place, correction)| (place, correction.stats)));
    }

    /// The statistics of the call, after all groups are done.
    pub(super) fn finish(mut self) -> AttnStats {
        assert!(self.out.is_complete());
        self.done.sort_by_key(|(place, _)| *place);
        let shape = self.inputs.shape;
        let heads = shape.batch() * shape.num_heads();
        let mut visits = vec![vec![Vec::new(); self.plan.segments.len()]; heads];
        for ([head, segment, _], of_run) in self.done {
            visits[head][segment].extend(of_run);
        }
        let mut measured = vec![Vec::new(); heads];
        self.measured.sort_by_key(|(place, _)| *place);
        self.measured.into_iter().for_each(|([head, _], stats)| measured[head].push(stats));
        self.plan.stats(&shape, self.config, |head, segment, tile| visits[head][segment][tile], measured)
    }
}
