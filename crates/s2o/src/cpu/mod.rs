//! The fast CPU path: GEMM tiles, threads over query tiles, keys gathered by index, early stopping.
//!
//! Input may be f32, f16 or bf16 in any layout; arithmetic and accumulation are f32.
//!
//! **Memory.** Beside the output, a call holds the key orders of the segments it is working on, at most
//! [`S2oConfig::workspace_cap`] bytes (segments are ranked in groups that fit), and per thread the states of a few
//! query tiles: about 2 MiB, or `4 * segment_len * head_dim` floats with query permutation.
//!
//! **NaN and infinity.** Nothing hangs and nothing panics. A NaN key or value reaches every output whose query sees
//! it in its window; a NaN key before the segment ranks first, so it is visited, and the output is NaN as it is in
//! dense attention. A NaN query makes its own output NaN, and its query tile never stops. Scores of `+inf` turn into
//! NaN, as in dense attention.

mod dense;
mod microkernel;
mod moments;
mod pass1;
mod pass2;
mod ranking;
mod schedule;
mod softmax;
mod strided;
mod tile;

pub use dense::dense;
pub use strided::{Element, Inputs, Strided};

use std::cmp::Reverse;
use std::ops::Range;

use rayon::prelude::*;

use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::online_softmax::SoftmaxState;
use crate::plan::{Chunk, Plan, Ranking, SegmentOrder, dense_stats};
use crate::segment::{Segment, causal_tiles, query_tiles};
use crate::stats::{AttnStats, HeadStats, SkippedMass, TileStats};
use dense::output_row;
use microkernel::OutputRows;
use tile::Workspace;

/// S2O attention into `out` (batch, q_len, num_heads, head_dim), contiguous.
///
/// # Errors
/// If `chunk` does not fit the shape, or the workspace cap holds not even one segment's orders.
///
/// # Panics
/// If `out` has not `batch * q_len * num_heads * head_dim` elements.
pub fn attention<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    chunk: Chunk,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, chunk)?;
    if plan.is_dense() {
        return Ok(whole_dense(inputs, config, out));
    }
    let mut call = Call::new(inputs, &plan, config, out);
    for wave in waves(inputs, &plan, config)? {
        let ranking = rank_wave(inputs, &plan, config, &wave);
        call.run(&wave, |unit, head| &ranking[&(unit.batch, head, unit.segment)]);
    }
    Ok(call.finish())
}

/// [`attention`] with orders given by the caller instead of Algorithm 1: `ranking[b * num_heads + h][s]` for the
/// `s`-th segment of the [`Plan`].
///
/// # Errors
/// If `chunk` does not fit the shape, or an order does not fit its segment.
///
/// # Panics
/// If `out` has not `batch * q_len * num_heads * head_dim` elements.
pub fn attention_with_ranking<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    chunk: Chunk,
    ranking: &Ranking,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, chunk)?;
    if plan.is_dense() {
        return Ok(whole_dense(inputs, config, out));
    }
    let heads = inputs.shape.batch() * inputs.shape.num_heads();
    check_length(heads, ranking.len())?;
    for orders in ranking {
        check_length(plan.segments.len(), orders.len())?;
        for (segment, order) in plan.segments.iter().zip(orders) {
            order.check(segment)?;
        }
    }
    let mut call = Call::new(inputs, &plan, config, out);
    let all = units(inputs, &plan);
    call.run(&all, |unit, head| &ranking[unit.batch * inputs.shape.num_heads() + head][unit.segment]);
    Ok(call.finish())
}

/// Algorithm 1 alone: the orders of every segment and head.
///
/// # Errors
/// If `chunk` does not fit the shape.
pub fn rank<T: Element>(inputs: &Inputs<'_, T>, config: &S2oConfig, chunk: Chunk) -> Result<Ranking, S2oError> {
    let plan = Plan::new(config, &inputs.shape, chunk)?;
    let mut ranking = rank_wave(inputs, &plan, config, &units(inputs, &plan));
    let shape = inputs.shape;
    Ok((0..shape.batch())
        .flat_map(|b| (0..shape.num_heads()).map(move |h| (b, h)))
        .map(|(b, h)| {
            (0..plan.segments.len()).map(|s| ranking.remove(&(b, h, s)).expect("every segment is ranked")).collect()
        })
        .collect())
}

/// Algorithm 2 alone: the states of the queries outside the dense tail after their local window, head by head
/// (`b * num_heads + h`), in the order of the rows.
///
/// # Errors
/// If `chunk` does not fit the shape.
pub fn pass1<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    chunk: Chunk,
) -> Result<Vec<Vec<SoftmaxState>>, S2oError> {
    let plan = Plan::new(config, &inputs.shape, chunk)?;
    let tiles = (config.tile_q(), config.tile_k());
    let shape = inputs.shape;
    let heads: Vec<(usize, usize)> =
        (0..shape.batch()).flat_map(|b| (0..shape.num_heads()).map(move |h| (b, h))).collect();
    Ok(heads
        .into_par_iter()
        .map(|at| {
            let mut workspace = Workspace::new(shape.head_dim(), config.tile_k());
            let mut states = Vec::new();
            for segment in plan.segments.iter().filter(|segment| !segment.rows.is_empty()) {
                let count =
                    pass1::contiguous(inputs, at, segment.rows.clone(), segment.start, true, tiles, &mut workspace);
                let tiles = &workspace.tiles[..count];
                states.extend(tiles.iter().flat_map(|tile| (0..tile.rows.len()).map(|i| tile.state(i))));
            }
            states
        })
        .collect())
}

fn check_length(expected: usize, got: usize) -> Result<(), S2oError> {
    if expected == got { Ok(()) } else { Err(crate::permutation::PermutationError::Length { expected, got }.into()) }
}

fn whole_dense<T: Element>(inputs: &Inputs<'_, T>, config: &S2oConfig, out: &mut [T]) -> AttnStats {
    dense(inputs, true, out);
    let shape = inputs.shape;
    let head = dense_stats(shape.kv_offset(), shape.q_len(), config.tile_q(), config.tile_k());
    AttnStats { num_heads: shape.num_heads(), heads: vec![head; shape.batch() * shape.num_heads()] }
}

/// One segment of one KV head: what is ranked together, because its query heads share the keys.
#[derive(Debug, Clone, Copy)]
struct Unit {
    batch: usize,
    kv_head: usize,
    /// Number into `plan.segments`.
    segment: usize,
}

/// Every unit of a call, later segments (with the longer prefixes) first.
fn units<T: Element>(inputs: &Inputs<'_, T>, plan: &Plan) -> Vec<Unit> {
    let shape = inputs.shape;
    let mut units = Vec::new();
    for segment in (0..plan.segments.len()).rev() {
        for batch in 0..shape.batch() {
            units.extend((0..shape.num_kv_heads()).map(|kv_head| Unit { batch, kv_head, segment }));
        }
    }
    units
}

/// Cuts the units into groups whose orders fit the workspace cap.
fn waves<T: Element>(inputs: &Inputs<'_, T>, plan: &Plan, config: &S2oConfig) -> Result<Vec<Vec<Unit>>, S2oError> {
    let cap = config.workspace_cap();
    let mut waves = vec![Vec::new()];
    let mut used = 0;
    for unit in units(inputs, plan) {
        let prefix_len = plan.segments[unit.segment].start;
        let bytes = ranking::workspace_bytes(inputs.shape.group_size(), prefix_len);
        if bytes > cap {
            return Err(S2oError::WorkspaceTooSmall { expected: bytes, got: cap, prefix_len });
        }
        if used + bytes > cap {
            waves.push(Vec::new());
            used = 0;
        }
        used += bytes;
        waves.last_mut().expect("begins with one wave").push(unit);
    }
    Ok(waves)
}

type Orders = std::collections::HashMap<(usize, usize, usize), SegmentOrder>;

/// Orders by (batch, head, number of the segment).
fn rank_wave<T: Element>(inputs: &Inputs<'_, T>, plan: &Plan, config: &S2oConfig, wave: &[Unit]) -> Orders {
    let shape = inputs.shape;
    let mut by_head: Vec<((usize, usize), Vec<usize>)> = Vec::new();
    for unit in wave {
        let at = (unit.batch, unit.kv_head);
        match by_head.iter_mut().find(|(head, _)| *head == at) {
            Some((_, segments)) => segments.push(unit.segment),
            None => by_head.push((at, vec![unit.segment])),
        }
    }
    by_head
        .into_par_iter()
        .flat_map_iter(|((batch, kv_head), segments)| {
            let orders = ranking::rank_group(inputs, plan, config, (batch, kv_head), &segments);
            let first_head = kv_head * shape.group_size();
            segments.into_iter().zip(orders).flat_map(move |(segment, heads)| {
                heads.into_iter().zip(first_head..).map(move |(order, head)| ((batch, head, segment), order))
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
    rows: Range<usize>,
    /// Absent for the dense tail.
    order: Option<&'a SegmentOrder>,
}

impl Item<'_> {
    /// Where its statistics belong.
    fn place(&self, num_heads: usize) -> Place {
        (self.batch * num_heads + self.head, self.segment.index, self.order.is_some(), self.rows.start)
    }
}

/// A call on its way through the waves.
struct Call<'a, T> {
    inputs: &'a Inputs<'a, T>,
    plan: &'a Plan,
    config: &'a S2oConfig,
    out: OutputRows<'a, T>,
    done: Vec<(Place, Vec<TileStats>)>,
}

impl<'a, T: Element> Call<'a, T> {
    fn new(inputs: &'a Inputs<'a, T>, plan: &'a Plan, config: &'a S2oConfig, out: &'a mut [T]) -> Self {
        Self { inputs, plan, config, out: OutputRows::new(out, inputs.shape.head_dim()), done: Vec::new() }
    }

    fn run<'o>(&mut self, wave: &[Unit], order: impl Fn(&Unit, usize) -> &'o SegmentOrder)
    where
        'a: 'o,
    {
        let shape = self.inputs.shape;
        let tile_q = self.config.tile_q();
        let total_tiles = shape.batch() * shape.num_heads() * shape.q_len().div_ceil(tile_q);
        let group_rows = tile_q * schedule::tiles_per_item(shape.head_dim(), tile_q, total_tiles);
        let mut items: Vec<Item<'o>> = Vec::new();
        for unit in wave {
            let segment: &'o Segment = &self.plan.segments[unit.segment];
            for head in (0..shape.num_heads()).filter(|&head| shape.kv_head(head) == unit.kv_head) {
                let mut push = |rows: Range<usize>, step: usize, order: Option<&'o SegmentOrder>| {
                    items.extend(query_tiles(rows, step).map(|rows| Item {
                        batch: unit.batch,
                        head,
                        segment,
                        rows,
                        order,
                    }));
                };
                push(segment.tail_rows.clone(), tile_q, None);
                // A permuted tile has rows from anywhere in its segment: the segment stays together.
                let step = if self.config.q_perm() { segment.rows.len().max(1) } else { group_rows };
                push(segment.rows.clone(), step, Some(order(unit, head)));
            }
        }
        items.sort_by_key(|item| (item.order.is_some(), Reverse(item.segment.start)));
        let done = schedule::run(
            &items,
            || Workspace::new(shape.head_dim(), self.config.tile_k()),
            |item, workspace, done| done.push((item.place(shape.num_heads()), self.attend(item, workspace))),
        );
        self.done.extend(done);
    }

    fn attend(&self, item: &Item<'_>, workspace: &mut Workspace) -> Vec<TileStats> {
        let Self { inputs, config, .. } = *self;
        let at = (item.batch, item.head);
        let tiles = (config.tile_q(), config.tile_k());
        let start = if item.order.is_some() { item.segment.start } else { 0 };
        let count = pass1::contiguous(inputs, at, item.rows.clone(), start, true, tiles, workspace);
        let prefix_tiles = item.segment.start / config.tile_k();
        let visits = match item.order {
            None => vec![pass2::Visit { visited: prefix_tiles, skipped_mass: SkippedMass::default() }; count],
            Some(order) => {
                if config.q_perm() {
                    pass2::permute(workspace, count, order, config.tile_q());
                }
                pass2::ranked(inputs, at, order, config, workspace, count)
            }
        };
        let permuted = config.q_perm() && item.order.is_some();
        let states = if permuted { &workspace.permuted[..count] } else { &workspace.tiles[..count] };
        for tile in states {
            tile.finish(&self.out, |row| output_row(inputs, item.batch, row, item.head), &mut workspace.rows);
        }
        let kv_offset = inputs.shape.kv_offset();
        query_tiles(item.rows.clone(), config.tile_q())
            .zip(visits)
            .map(|(rows, visit)| TileStats {
                segment: item.segment.index,
                dense_tail: item.order.is_none(),
                rows: rows.len(),
                window_tiles: causal_tiles(item.segment.start, kv_offset + rows.end - 1, config.tile_k()),
                prefix_tiles,
                visited: visit.visited,
                skipped_mass: visit.skipped_mass,
            })
            .collect()
    }

    fn finish(mut self) -> AttnStats {
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
