//! The fast CPU path: GEMM tiles, threads over query tiles, keys gathered by index, early stopping.
//!
//! Input may be f32, f16 or bf16 in any layout; arithmetic and accumulation are f32.
//!
//! **Memory.** In addition to the output, a call holds the key orders of the segments in progress, at most
//! [`S2oConfig::workspace_cap`] bytes (segments are ranked in groups that fit). Each thread holds the states of a few
//! query tiles: about 2 MiB at the default tiles, or `4 * segment_len * head_dim` floats with query permutation. A call
//! also holds one byte per output row, and 48 bytes of statistics per query tile and head; with probes, 16 bytes per
//! query and head of the segments in progress.
//!
//! **Structure of a call.** [`attention`] makes the plan and cuts it into segment groups (`segment_group`). For each
//! group it ranks the keys (`ranking`) and distributes runs of query tiles (`call`). A run (`tile_run`)
//! processes its window (`pass1`) and its prefix (`pass2`) one key tile at a time (`tile`), with two matrix products
//! and a softmax per key tile (`microkernel`, `softmax`). After a group, exact probes correct its other queries
//! (`probes`).
//!
//! **NaN and infinity.** No input causes a hang or a panic. A non-finite key ranks before all others, so every query
//! tile visits it, and the output is NaN where dense attention gives NaN. A non-finite query is left out of the mean
//! that ranks its segment's keys. Its own output is NaN, and under `AllRows` or `MeanRatio` its query tile sees every
//! key. A non-finite value reaches the queries of every tile that visits its key. In the window it reaches all queries
//! of its query tile, including earlier queries.

mod block_sparse;
mod call;
mod dense;
mod microkernel;
mod moments;
mod pass1;
mod pass2;
mod probes;
mod ranking;
mod segment_group;
mod softmax;
mod strided;
mod tile;
mod tile_run;

pub use block_sparse::block_sparse;
pub use dense::dense;
pub use strided::{Element, Inputs, Strided};

use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::plan::{Plan, Ranking, SegmentOrder};
use crate::shape::Mask;
use crate::stats::AttnStats;
use call::Call;
use segment_group::SegmentHeads;

/// S2O attention, written to the contiguous `out` (batch, q_len, num_heads, head_dim).
///
/// # Errors
/// If `prompt_len` does not fit the shape, or the orders of one segment do not fit the workspace cap.
///
/// # Panics
/// If the length of `out` is not `batch * q_len * num_heads * head_dim`.
pub fn attention<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    prompt_len: usize,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len, S2oConfig::CPU_BREAK_EVEN)?;
    if plan.is_dense() {
        dense(inputs, Mask::Causal, out);
        return Ok(plan.stats(&inputs.shape, config, |_, _, _| 0, Vec::new()));
    }
    let mut call = Call::new(inputs, &plan, config, out);
    for group in segment_group::groups(&inputs.shape, &plan, config.workspace_cap())? {
        let orders = ranking::rank(inputs, &plan, config, &group);
        call.run(&group, |i, g| &orders[i][g]);
    }
    Ok(call.finish())
}

/// [`attention`] with orders from the caller instead of Algorithm 1. `ranking[b * num_heads + h][s]` is the order of
/// the `s`-th segment of the [`Plan`].
///
/// # Errors
/// If `prompt_len` does not fit the shape, or an order does not fit its segment.
///
/// # Panics
/// If the length of `out` is not `batch * q_len * num_heads * head_dim`.
pub fn attention_with_ranking<T: Element>(
    inputs: &Inputs<'_, T>,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: &Ranking,
    out: &mut [T],
) -> Result<AttnStats, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len, S2oConfig::CPU_BREAK_EVEN)?;
    if plan.is_dense() {
        dense(inputs, Mask::Causal, out);
        return Ok(plan.stats(&inputs.shape, config, |_, _, _| 0, Vec::new()));
    }
    plan.check_ranking(&inputs.shape, ranking)?;
    let mut call = Call::new(inputs, &plan, config, out);
    let all = SegmentHeads::ranked(&inputs.shape, &plan);
    call.run(&all, |i, g| {
        let SegmentHeads { batch, heads, segment } = &all[i];
        &ranking[batch * inputs.shape.num_heads() + heads.start + g][*segment]
    });
    Ok(call.finish())
}

/// Runs only Algorithm 1: returns the orders of every segment and head.
///
/// # Errors
/// If `prompt_len` does not fit the shape.
pub fn rank<T: Element>(inputs: &Inputs<'_, T>, config: &S2oConfig, prompt_len: usize) -> Result<Ranking, S2oError> {
    let plan = Plan::new(config, &inputs.shape, prompt_len, S2oConfig::CPU_BREAK_EVEN)?;
    let (shape, num_heads) = (inputs.shape, inputs.shape.num_heads());
    let mut ranking = vec![vec![SegmentOrder::default(); plan.segments.len()]; shape.batch() * num_heads];
    let segments = SegmentHeads::all(&shape, &plan);
    for (segment, orders) in segments.iter().zip(ranking::rank(inputs, &plan, config, &segments)) {
        for (head, order) in segment.heads.clone().zip(orders) {
            ranking[segment.batch * num_heads + head][segment.segment] = order;
        }
    }
    Ok(ranking)
}
