//! S2O's dense tail: exact attention of the last rows of a prompt, split over the keys.

use std::ffi::c_void;

use s2o_core::Mask;
use s2o_cuda::{CudaError, Grid, Regions, to_i32};
use s2o_kernels::params::{AttnParams, ProbeParams, RowState, SplitParams};
use s2o_kernels::{Kernel, TILE_K, TILE_Q};

use super::call::Call;
use super::dense;
use super::probes::{MIN_TILES_OF_PART, WARPS, side_by_side};

/// Parts of the keys of one query tile: 32 heads give an H200 twice the items that it runs at once.
const PARTS: usize = 16;

/// Exact attention of the rows from `first_row` on, the last of the call. The parts do not depend on the heads: the output of
/// a head is the same, bit for bit, whichever other heads the call has.
pub(super) fn launch(call: &Call, first_row: usize) -> Result<(), CudaError> {
    let shape = &call.shape;
    let rows = shape.q_len() - first_row;
    let most = shape.k_len().div_ceil(TILE_K) / MIN_TILES_OF_PART;
    let parts = (PARTS / rows.div_ceil(TILE_Q)).min(most).max(1);
    if rows < TILE_Q && shape.group_size() > 1 {
        of_groups(&call.rows_from(first_row), parts)
    } else {
        dense::launch(call, Mask::Causal, first_row, Some(parts))
    }
}

/// Few rows, whose tiles have the heads of a KV head together: half a tile of rows costs half as much as a tile, not the same.
fn of_groups(call: &Call, parts: usize) -> Result<(), CudaError> {
    let shape = &call.shape;
    let (batch, kv_heads, head_dim) = (shape.batch(), shape.num_kv_heads(), shape.head_dim());
    let (heads, slots) = (batch * shape.num_heads(), shape.q_len());
    let rows = slots * shape.group_size();
    let key_tiles = shape.k_len().div_ceil(TILE_K);
    let per_part = key_tiles.div_ceil(parts);
    let parts = key_tiles.div_ceil(per_part);
    let items = batch * kv_heads * rows.div_ceil(TILE_Q) * parts;

    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let positions = regions.add::<i32>(heads * slots);
    let queries = regions.add::<u16>(heads * slots * head_dim);
    let partial_out = regions.add::<f32>(items * TILE_Q * head_dim);
    let partial_state = regions.add::<RowState>(items * TILE_Q);
    let scratch = call.allocate(&regions)?;
    scratch.zero(next_item)?;

    let attn = call.params(Mask::Causal, scratch.at(next_item))?;
    let queries = side_by_side(call, scratch.at(queries), rows);
    let split = SplitParams {
        attn: AttnParams {
            q: queries.address as *const c_void,
            q_strides: queries.strides,
            num_heads: attn.num_kv_heads,
            q_len: to_i32("rows", rows)?,
            ..attn
        },
        partial_out: scratch.at(partial_out),
        partial_state: scratch.at(partial_state),
        first_row: 0,
        num_splits: to_i32("parts", parts)?,
        tiles_per_split: to_i32("tiles per part", per_part)?,
        head_dim: to_i32("head_dim", head_dim)?,
        tile_rows: TILE_Q as i32,
        merge_warps: 1,
        group: to_i32("heads", shape.group_size())?,
    };
    let params = ProbeParams {
        q: attn.q,
        q_strides: attn.q_strides,
        ..ProbeParams::exact(split, scratch.at(positions), attn.num_heads, attn.q_len, [attn.q_len, 1])
    };
    // SAFETY: the kernels take ProbeParams, and `merge` the SplitParams in it. The regions have room for every row and item,
    // and the scratch memory is released on this stream after the launches.
    unsafe {
        call.launch(Kernel::TailQueries, &params, Grid::Blocks([slots.div_ceil(WARPS), heads, 1]))?;
        call.launch_with(Kernel::Probes, queries, &params, Grid::Persistent { items })?;
        call.launch(Kernel::Merge, &params.split, Grid::Warps { rows: heads * slots })
    }
}
