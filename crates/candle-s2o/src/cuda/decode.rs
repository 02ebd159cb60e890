//! Dense attention of one query per sequence.

use std::ptr;

use s2o_core::Mask;
use s2o_cuda::{CudaError, Grid, Regions, to_i32};
use s2o_kernels::decode::{Parts, blocks};
use s2o_kernels::params::{RowState, SplitParams};
use s2o_kernels::{Kernel, MERGE_WARPS};

use super::call::Call;

/// Dense attention of a call with `q_len` 1.
pub(super) fn launch(call: &Call) -> Result<(), CudaError> {
    let shape = &call.shape;
    let heads = shape.batch() * shape.num_heads();
    let parts = Parts::new(shape.k_len());
    let mut regions = Regions::default();
    let partial_out = regions.add::<f32>(parts.rows(heads) * shape.head_dim());
    let partial_state = regions.add::<RowState>(parts.rows(heads));
    let scratch = call.allocate(&regions)?;
    let params = SplitParams {
        attn: call.params(Mask::Full, ptr::null_mut())?,
        partial_out: scratch.at(partial_out),
        partial_state: scratch.at(partial_state),
        first_row: 0,
        num_splits: to_i32("parts", parts.count)?,
        tiles_per_split: to_i32("tiles per part", parts.tiles)?,
        head_dim: to_i32("head_dim", shape.head_dim())?,
        tile_rows: 1,
        merge_warps: MERGE_WARPS as i32,
    };
    let blocks = blocks(shape.batch(), shape.num_kv_heads(), shape.group_size());
    // SAFETY: both kernels take SplitParams, and neither counts items. The partial results have room for every part,
    // and the scratch memory is released on this stream after both.
    unsafe {
        call.launch(Kernel::Decode, &params, Grid::Blocks([blocks, parts.count, 1]))?;
        match parts.count {
            1 => Ok(()),
            _ => call.launch(Kernel::Merge, &params, Grid::Warps { rows: heads * MERGE_WARPS }),
        }
    }
}
