//! Dense attention of one query per sequence.

use std::ptr;

use s2o_core::Mask;
use s2o_cuda::{CudaError, Grid, Regions, to_i32};
use s2o_kernels::params::{RowState, SplitParams};
use s2o_kernels::{DECODE_HEADS, Kernel, MERGE_WARPS, TILE_K};

use super::call::Call;

/// Keys of the shortest part, and of the longest before there are more parts.
const PART_KEYS: [usize; 2] = [256, 4096];
/// Number of parts while they grow, and the greatest number. An H100 runs 264 blocks at once, 33 for each of 8 KV heads.
/// With 64 parts 32K keys take 15 % more time, with 128 parts 128K keys 10 % (H200, 8 KV heads).
const PARTS: [usize; 2] = [32, 128];

/// Key tiles of a part. They depend on the number of keys alone: the output of a head is the same, bit for bit,
/// whichever other heads the call has.
fn tiles_per_part(k_len: usize) -> usize {
    let [least, most] = PART_KEYS;
    let keys = (k_len / PARTS[0]).clamp(least, most).max(k_len.div_ceil(PARTS[1]));
    keys.div_ceil(TILE_K)
}

/// Dense attention of a call with `q_len` 1.
pub(super) fn launch(call: &Call) -> Result<(), CudaError> {
    let shape = &call.shape;
    let heads = shape.batch() * shape.num_heads();
    let tiles_per_part = tiles_per_part(shape.k_len());
    let parts = shape.k_len().div_ceil(TILE_K).div_ceil(tiles_per_part);
    let partial_rows = if parts > 1 { heads * parts } else { 0 };
    let mut regions = Regions::default();
    let partial_out = regions.add::<f32>(partial_rows * shape.head_dim());
    let partial_state = regions.add::<RowState>(partial_rows);
    let scratch = call.allocate(&regions)?;
    let params = SplitParams {
        attn: call.params(Mask::Full, ptr::null_mut())?,
        partial_out: scratch.at(partial_out),
        partial_state: scratch.at(partial_state),
        first_row: 0,
        num_splits: to_i32("parts", parts)?,
        tiles_per_split: to_i32("tiles per part", tiles_per_part)?,
        head_dim: to_i32("head_dim", shape.head_dim())?,
        tile_rows: 1,
        merge_warps: MERGE_WARPS as i32,
    };
    let blocks = shape.batch() * shape.num_kv_heads() * shape.group_size().div_ceil(DECODE_HEADS);
    // SAFETY: both kernels take SplitParams, and neither counts items. The partial results have room for every part,
    // and the scratch memory is released on this stream after both.
    unsafe {
        call.launch(Kernel::Decode, &params, Grid::Blocks([blocks, parts, 1]))?;
        match parts {
            1 => Ok(()),
            _ => call.launch(Kernel::Merge, &params, Grid::Warps { rows: heads * MERGE_WARPS }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_a_gpu_and_are_not_too_many() {
        let parts = |k_len: usize| k_len.div_ceil(TILE_K).div_ceil(tiles_per_part(k_len));
        assert_eq!([1, 256, 257, 4096].map(parts), [1, 1, 2, 16]);
        assert_eq!([8192, 32768, 131_072, 262_144, 1_048_576].map(parts), [32, 32, 32, 64, 128]);
        assert!((1..300_000).all(|k_len| parts(k_len) <= 128));
    }
}
