//! Dense attention of one query per sequence.

use std::ptr;

use s2o_core::{AttnShape, Mask, ScoreScale};
use s2o_cuda::{CudaError, Grid, Regions, to_i32};
use s2o_kernels::decode::{Parts, blocks};
use s2o_kernels::params::{RowState, SplitParams};
use s2o_kernels::{HeadDim, Kernel, MERGE_WARPS};

use super::call::Call;

/// The head size of the kernel that computes a call, if there is one: it takes heads up to its size, in multiples of 8.
/// A single query sees every key under either mask.
pub(super) fn head_dim(shape: &AttnShape, scale: ScoreScale) -> Option<HeadDim> {
    let fits = shape.q_len() == 1 && scale.softcap.is_none() && shape.head_dim().is_multiple_of(8);
    Kernel::Decode.holding(shape.head_dim()).filter(|_| fits)
}

/// Dense attention of a call that has a [`head_dim`] here.
pub(super) fn launch(call: &Call) -> Result<(), CudaError> {
    let shape = &call.shape;
    let heads = shape.batch() * shape.num_heads();
    let parts = Parts::new(shape.k_len());
    let mut regions = Regions::default();
    let partial_out = regions.add::<f32>(parts.rows(heads) * call.head_dim.get());
    let partial_state = regions.add::<RowState>(parts.rows(heads));
    let scratch = call.allocate(&regions)?;
    let params = SplitParams {
        attn: call.params(Mask::Full, ptr::null_mut())?,
        partial_out: scratch.at(partial_out),
        partial_state: scratch.at(partial_state),
        first_row: 0,
        num_splits: to_i32("parts", parts.count)?,
        tiles_per_split: to_i32("tiles per part", parts.tiles)?,
        head_dim: to_i32("head_dim", call.head_dim.get())?,
        tile_rows: 1,
        merge_warps: MERGE_WARPS as i32,
        group: 1,
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
