//! One call on its way through the workers: units are ranked in waves that fit the workspace, then attended as items.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;

use super::dense::output_row;
use super::microkernel::OutputRows;
use super::pass1::contiguous;
use super::pass2::{Visit, permute, ranked};
use super::ranking::{self, rank_group};
use super::schedule::{run, tiles_per_item};
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::plan::{Plan, SegmentOrder};
use crate::segment::{Segment, causal_tiles, query_tiles};
use crate::stats::{AttnStats, HeadStats, SkippedMass, TileStats};

/// One segment of the heads that share a KV head: what is ranked together, because they read the same keys.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub(super) batch: usize,
    kv_head: usize,
    heads: Range<usize>,
    /// Number into `plan.segments`.
    pub(super) segment: usize,
}

/// Every unit of a call, later segments (with the longer prefixes) first.
pub(super) fn units<T: Element>(inputs: &Inputs<'_, T>, plan: &Plan) -> Vec<Unit> {
    let shape = inputs.shape;
    let group = shape.group_size();
    let mut units = Vec::new();
    for segment in (0..plan.segments.len()).rev() {
        for batch in 0..shape.batch() {
            units.extend((0..shape.num_kv_heads()).map(|kv_head| {
                let heads = kv_head * group..(kv_head + 1) * group;
                Unit { batch, kv_head, heads, segment }
            }));
        }
    }
    units
}

/// Cuts the units into waves whose orders fit the workspace cap. Heads are ranked one by one where their group does not
/// fit; segments that lie in the dense tail whole need no order.
pub(super) fn waves<T: Element>(
    inputs: &Inputs<'_, T>,
    plan: &Plan,
    config: &S2oConfig,
) -> Result<Vec<Vec<Unit>>, S2oError> {
    let cap = config.workspace_cap();
    let mut waves = vec![Vec::new()];
    let mut used = 0;
    for unit in units(inputs, plan) {
        let segment = &plan.segments[unit.segment];
        let bytes =
            |heads: usize| if segment.rows.is_empty() { 0 } else { ranking::workspace_bytes(heads, segment.start) };
        if bytes(1) > cap {
            return Err(S2oError::WorkspaceTooSmall { expected: bytes(1), got: cap, prefix_len: segment.start });
        }
        let parts: Vec<Unit> = if bytes(unit.heads.len()) <= cap {
            vec![unit]
        } else {
            unit.heads.clone().map(|head| Unit { heads: head..head + 1, ..unit.clone() }).collect()
        };
        for part in parts {
            let bytes = bytes(part.heads.len());
            if used + bytes > cap {
                waves.push(Vec::new());
                used = 0;
            }
            used += bytes;
            waves.last_mut().expect("begins with one wave").push(part);
        }
    }
    Ok(waves)
}

/// Orders by (batch, head, number of the segment).
pub(super) type Orders = HashMap<(usize, usize, usize), SegmentOrder>;

/// Ranks units, those of the same heads together.
pub(super) fn rank_units<'u, T: Element>(
    inputs: &Inputs<'_, T>,
    plan: &Plan,
    config: &S2oConfig,
    units: impl Iterator<Item = &'u Unit>,
) -> Orders {
    let mut by_heads: HashMap<(usize, usize, Range<usize>), Vec<usize>> = HashMap::new();
    for unit in units {
        by_heads.entry((unit.batch, unit.kv_head, unit.heads.clone())).or_default().push(unit.segment);
    }
    by_heads
        .into_par_iter()
        .flat_map_iter(|((batch, kv_head, heads), segments)| {
            let orders = rank_group(inputs, plan, config, (batch, kv_head), heads.clone(), &segments);
            segments.into_iter().zip(orders).flat_map(move |(segment, orders)| {
                orders.into_iter().zip(heads.clone()).map(move |(order, head)| ((batch, head, segment), order))
            })
        })
        .collect()
}

/// (head, segment, ranked, first row): orders statistics segment by segment, the dense tail first.
type Place = (usize, usize, bool, usize);

/// What one worker does at a time: some query tiles of one segment and head.
struct Item<'a> {
    batch: usize,
    head: usize,
    segment: &'a Segment,
    tiles: Vec<Range<usize>>,
    /// Absent for the dense tail.
    order: Option<&'a SegmentOrder>,
}

impl Item<'_> {
    /// Where its statistics belong.
    fn place(&self, num_heads: usize) -> Place {
        (self.batch * num_heads + self.head, self.segment.index, self.order.is_some(), self.tiles[0].start)
    }
}

/// A call on its way through the waves.
pub(super) struct Call<'a, T> {
    inputs: &'a Inputs<'a, T>,
    plan: &'a Plan,
    config: &'a S2oConfig,
    out: OutputRows<'a, T>,
    done: Vec<(Place, Vec<TileStats>)>,
}

impl<'a, T: Element> Call<'a, T> {
    pub(super) fn new(inputs: &'a Inputs<'a, T>, plan: &'a Plan, config: &'a S2oConfig, out: &'a mut [T]) -> Self {
        Self { inputs, plan, config, out: OutputRows::new(out, inputs.shape.head_dim()), done: Vec::new() }
    }

    /// Attends everything in `wave`; `order` gives the order of a unit's segment for one of its heads, and is not asked
    /// for segments that lie in the dense tail whole.
    pub(super) fn run<'o>(&mut self, wave: &[Unit], order: impl Fn(&Unit, usize) -> &'o SegmentOrder)
    where
        'a: 'o,
    {
        let shape = self.inputs.shape;
        let tile_q = self.config.tile_q();
        let total_tiles = shape.batch() * shape.num_heads() * shape.q_len().div_ceil(tile_q);
        let per_item = tiles_per_item(shape.head_dim(), tile_q, total_tiles);
        let mut items: Vec<Item<'o>> = Vec::new();
        for unit in wave {
            let segment: &'o Segment = &self.plan.segments[unit.segment];
            for head in unit.heads.clone() {
                let mut push = |tiles: &[Range<usize>], per_item: usize, order: Option<&'o SegmentOrder>| {
                    items.extend(tiles.chunks(per_item).map(|tiles| Item {
                        batch: unit.batch,
                        head,
                        segment,
                        tiles: tiles.to_vec(),
                        order,
                    }));
                };
                push(&query_tiles(segment.tail_rows.clone(), tile_q).collect::<Vec<_>>(), 1, None);
                let ranked = segment.ranked_tiles(shape.q_offset(), self.config);
                if !ranked.is_empty() {
                    // A permuted tile has rows from anywhere in its segment: the segment stays together.
                    let per_item = if self.config.q_perm() { ranked.len() } else { per_item };
                    push(&ranked, per_item, Some(order(unit, head)));
                }
            }
        }
        items.sort_by_key(|item| (item.order.is_some(), Reverse(item.segment.start)));
        let done = run(
            &items,
            || Workspace::new(shape.head_dim(), self.config.tile_k()),
            |item, workspace, done| done.push((item.place(shape.num_heads()), self.attend(item, workspace))),
        );
        self.done.extend(done);
    }

    fn attend(&self, item: &Item<'_>, workspace: &mut Workspace) -> Vec<TileStats> {
        let Self { inputs, config, .. } = *self;
        let at = (item.batch, item.head);
        let count = item.tiles.len();
        let start = if item.order.is_some() { item.segment.start } else { 0 };
        contiguous(inputs, at, &item.tiles, start, true, config.tile_k(), workspace);
        let prefix_tiles = item.segment.start / config.tile_k();
        let visits = match item.order {
            None => vec![Visit { visited: prefix_tiles, skipped_mass: SkippedMass::default() }; count],
            Some(order) => {
                if config.q_perm() {
                    permute(workspace, count, order, config.tile_q());
                }
                ranked(inputs, at, order, config, workspace, count)
            }
        };
        let permuted = config.q_perm() && item.order.is_some();
        let states = if permuted { &workspace.permuted[..count] } else { &workspace.tiles[..count] };
        for tile in states {
            tile.finish(&self.out, |row| output_row(inputs, item.batch, row, item.head), &mut workspace.rows);
        }
        let q_offset = inputs.shape.q_offset();
        item.tiles
            .iter()
            .zip(visits)
            .map(|(rows, visit)| TileStats {
                segment: item.segment.index,
                dense_tail: item.order.is_none(),
                rows: rows.len(),
                window_tiles: causal_tiles(item.segment.start, q_offset + rows.end - 1, config.tile_k()),
                prefix_tiles,
                visited: visit.visited,
                skipped_mass: Some(visit.skipped_mass),
            })
            .collect()
    }

    pub(super) fn finish(mut self) -> AttnStats {
        assert!(self.out.is_complete());
        let shape = self.inputs.shape;
        self.done.sort_by_key(|(place, _)| *place);
        let mut heads = vec![HeadStats::default(); shape.batch() * shape.num_heads()];
        for ((head, ..), tiles) in self.done {
            heads[head].tiles.extend(tiles);
        }
        AttnStats { num_heads: shape.num_heads(), heads }
    }
}
