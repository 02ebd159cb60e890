//! Dense attention in one launch, or split over the keys if there are too few query tiles to fill the GPU. A single query
//! has its own kernel with head_dim up to 128 and without softcap, see [`decode`].

use candle_core::Tensor;
use s2o_core::{AttnShape, Mask, ScoreScale};
use s2o_cuda::{CudaError, Grid, Regions, head_dim, to_i32};
use s2o_kernels::params::{RowState, SplitParams};
use s2o_kernels::{HeadDim, Kernel, TILE_K, TILE_Q};

use super::call::{Call, CudaOp};
use super::decode;
use crate::attn_op::apply;
use crate::error::AttnError;
use crate::ops::DenseOp;

/// Minimum length of a part in key tiles: the result of each part must be written and read again.
const MIN_TILES_PER_SPLIT: usize = 4;
/// Parts per multiprocessor: more than one to balance the load.
const SPLITS_PER_SM: usize = 2;

impl CudaOp for DenseOp {
    fn head_dim(&self, shape: &AttnShape, scale: ScoreScale) -> Result<HeadDim, CudaError> {
        let of_decode = if self.splits.is_none() { decode::head_dim(shape, scale) } else { None };
        of_decode.map_or_else(|| head_dim(Kernel::Dense, shape.head_dim()), Ok)
    }

    fn run(&self, call: &Call) -> Result<(), AttnError> {
        match self.splits {
            None if decode::head_dim(&call.shape, call.scale).is_some() => Ok(decode::launch(call)?),
            splits => Ok(launch(call, self.mask, 0, splits)?),
        }
    }
}

/// [`dense_attn`](crate::dense_attn) with the keys cut into `splits` parts, for tests of the split kernels, also with a
/// single query. Other calls choose the number of parts automatically.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
#[doc(hidden)]
pub fn dense_attn_split(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: Mask,
    splits: usize,
) -> Result<Tensor, AttnError> {
    Ok(apply(&DenseOp { mask, splits: Some(splits) }, softmax_scale, [q, k, v])?.0)
}

/// Dense attention of the rows from `first_row` on. `splits` forces a number of parts.
pub(super) fn launch(call: &Call, mask: Mask, first_row: usize, splits: Option<usize>) -> Result<(), CudaError> {
    let shape = &call.shape;
    let rows = shape.q_len() - first_row;
    let items = rows.div_ceil(TILE_Q) * shape.batch() * shape.num_heads();
    let key_tiles = shape.k_len().div_ceil(TILE_K);
    let splits = splits.unwrap_or_else(|| match items {
        items if items >= call.launcher.multiprocessors() => 1,
        items => {
            let wanted = SPLITS_PER_SM * call.launcher.multiprocessors() / items;
            wanted.min(key_tiles / MIN_TILES_PER_SPLIT).max(1)
        }
    });
    if splits > 1 { split(call, mask, first_row, splits) } else { whole(&call.rows_from(first_row), mask) }
}

fn whole(call: &Call, mask: Mask) -> Result<(), CudaError> {
    let shape = &call.shape;
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let scratch = call.allocate(&regions)?;
    scratch.zero(next_item)?;
    let params = call.params(mask, scratch.at(next_item))?;
    // Causal tiles are cut on absolute positions.
    let first = if mask.is_causal() { shape.q_offset() % TILE_Q } else { 0 };
    let items = (first + shape.q_len()).div_ceil(TILE_Q) * shape.batch() * shape.num_heads();
    // SAFETY: the dense kernel takes AttnParams. Tensors and counter outlive the launch on this stream.
    unsafe { call.launch(Kernel::Dense, &params, Grid::Persistent { items }) }
}

/// Cuts the keys into `splits` parts, or fewer if there are fewer key tiles, and joins the results.
fn split(call: &Call, mask: Mask, first_row: usize, splits: usize) -> Result<(), CudaError> {
    let shape = &call.shape;
    let heads = shape.batch() * shape.num_heads();
    let rows = shape.q_len() - first_row;
    let key_tiles = shape.k_len().div_ceil(TILE_K);
    let tiles_per_split = key_tiles.div_ceil(splits);
    let num_splits = key_tiles.div_ceil(tiles_per_split);
    let items = heads * rows.div_ceil(TILE_Q) * num_splits;
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let partial_out = regions.add::<f32>(items * TILE_Q * shape.head_dim());
    let partial_state = regions.add::<RowState>(items * TILE_Q);
    let scratch = call.allocate(&regions)?;
    scratch.zero(next_item)?;
    let params = SplitParams {
        attn: call.params(mask, scratch.at(next_item))?,
        partial_out: scratch.at(partial_out),
        partial_state: scratch.at(partial_state),
        first_row: to_i32("first_row", first_row)?,
        num_splits: to_i32("splits", num_splits)?,
        tiles_per_split: to_i32("tiles per split", tiles_per_split)?,
        head_dim: to_i32("head_dim", shape.head_dim())?,
        tile_rows: TILE_Q as i32,
        merge_warps: 1,
        group: 1,
    };
    // SAFETY: both kernels take SplitParams. The partial results have room for every item, and the scratch memory is
    // released on this stream after both.
    unsafe {
        call.launch(Kernel::Split, &params, Grid::Persistent { items })?;
        call.launch(Kernel::Merge, &params, Grid::Warps { rows: rows * heads })
    }
}
