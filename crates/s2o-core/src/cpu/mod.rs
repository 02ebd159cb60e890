//! The fast CPU path: GEMM tiles, threads over query tiles, keys gathered by index, early stopping.
//!
//! Input may be f32, f16 or bf16 in any layout; arithmetic and accumulation are f32.
//!
//! **Memory.** Beside the output, a call holds the key orders of the segments it is working on, at most
//! [`S2oConfig::workspace_cap`] bytes (segments are ranked in groups that fit); per thread the states of a few query
//! tiles, about 2 MiB at the default tiles, or `4 * segment_len * head_dim` floats with query permutation; a byte per
//! output row; and 64 bytes of statistics per query tile and head.
//!
//! **NaN and infinity.** Nothing hangs and nothing panics. A key that is not finite ranks before all others, so every
//! query tile visits it, and the output is NaN where it is in dense attention. A query that is not finite is left out
//! of the mean that ranks its segment's keys; its own output is NaN, and under `AllRows` or `MeanRatio` its query tile
//! sees every key. A value that is not finite reaches the queries of every tile that visits its key, and in the window
//! those of the query tile it stands in, the earlier ones included.

mod block_sparse;
mod call;
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

pub use block_sparse::block_sparse;
pub use dense::dense;
pub use strided::{Element, Inputs, Strided};

use rayon::prelude::*;

use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::online_softmax::SoftmaxState;
use crate::plan::{Plan, Ranking, dense_stats};
use crate::stats::AttnStats;
use call::{Call, rank_units, units, waves};
use tile::Workspace;

/// S2O attention into `out` (batch, q_len, num_heads, head_dim), contiguous.
///
/// # Errors
/// If `prompt_len` does not fit the shape, or the workspace cap holds not even one segment's orders.
///
/// # Panics
/// If `out` has not `batch * q_len * num_heads * head_dim` elements.
pub fn attention<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    prompt_len: usize,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len)?;
    if plan.is_dense() {
        return Ok(whole_dense(inputs, config, out));
    }
    let mut call = Call::new(inputs, &plan, config, out);
    for wave in waves(inputs, &plan, config)? {
        let ranked = wave.iter().filter(|unit| !plan.segments[unit.segment].rows.is_empty());
        let ranking = rank_units(inputs, &plan, config, ranked);
        call.run(&wave, |unit, head| &ranking[&(unit.batch, head, unit.segment)]);
    }
    Ok(call.finish())
}

/// [`attention`] with orders given by the caller instead of Algorithm 1: `ranking[b * num_heads + h][s]` for the
/// `s`-th segment of the [`Plan`].
///
/// # Errors
/// If `prompt_len` does not fit the shape, or an order does not fit its segment.
///
/// # Panics
/// If `out` has not `batch * q_len * num_heads * head_dim` elements.
pub fn attention_with_ranking<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: &Ranking,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len)?;
    if plan.is_dense() {
        return Ok(whole_dense(inputs, config, out));
    }
    plan.check_ranking(&inputs.shape, ranking)?;
    let mut call = Call::new(inputs, &plan, config, out);
    let all = units(inputs, &plan);
    call.run(&all, |unit, head| &ranking[unit.batch * inputs.shape.num_heads() + head][unit.segment]);
    Ok(call.finish())
}

/// Algorithm 1 alone: the orders of every segment and head.
///
/// # Errors
/// If `prompt_len` does not fit the shape.
pub fn rank<T: Element>(inputs: &Inputs<'_, T>, config: &S2oConfig, prompt_len: usize) -> Result<Ranking, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len)?;
    let mut ranking = rank_units(inputs, &plan, config, units(inputs, &plan).iter());
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
/// If `prompt_len` does not fit the shape.
pub fn pass1<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    prompt_len: usize,
) -> Result<Vec<Vec<SoftmaxState>>, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len)?;
    let shape = inputs.shape;
    let heads: Vec<(usize, usize)> =
        (0..shape.batch()).flat_map(|b| (0..shape.num_heads()).map(move |h| (b, h))).collect();
    Ok(heads
        .into_par_iter()
        .map(|at| {
            let mut workspace = Workspace::new(shape.head_dim(), config.tile_k());
            let mut states = Vec::new();
            for segment in plan.segments.iter().filter(|segment| !segment.rows.is_empty()) {
                let cut = segment.ranked_tiles(shape.q_offset(), config);
                pass1::contiguous(inputs, at, &cut, segment.start, true, config.tile_k(), &mut workspace);
                let tiles = &workspace.tiles[..cut.len()];
                states.extend(tiles.iter().flat_map(|tile| (0..tile.rows.len()).map(|i| tile.state(i))));
            }
            states
        })
        .collect())
}

fn whole_dense<T: Element>(inputs: &Inputs<'_, T>, config: &S2oConfig, out: &mut [T]) -> AttnStats {
    dense(inputs, true, out);
    let shape = inputs.shape;
    let head = dense_stats(shape.q_offset(), shape.q_len(), config.tile_q(), config.tile_k());
    AttnStats { num_heads: shape.num_heads(), heads: vec![head; shape.batch() * shape.num_heads()] }
}
