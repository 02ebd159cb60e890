//! Attention on lists of blocks: what block-sparse methods select, computed by the engine of the others.

use s2o::{BLOCK_Q, BlockSelection};
use s2o_kernels::Kernel;
use s2o_kernels::params::BlockParams;

use super::call::{Call, Grid};
use super::error::CudaError;
use super::memory::Regions;

/// Attention to a selection that fits the call.
pub(crate) fn attend(call: &Call, causal: bool, selection: &BlockSelection) -> Result<(), CudaError> {
    let blocks = &selection.blocks;
    if blocks.block_k() != BLOCK_Q {
        return Err(CudaError::Tile { name: "block_k", got: blocks.block_k() });
    }
    for (what, given) in
        [("columns", selection.columns.is_some()), ("a value threshold", selection.value_threshold.is_some())]
    {
        if given {
            return Err(CudaError::CpuOnly { what });
        }
    }
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let key_blocks = regions.add::<i32>(blocks.key_blocks().len());
    let offsets = regions.add::<i64>(blocks.offsets().len());
    let scratch = call.allocate(&regions)?;
    scratch.zero(&call.stream, next_item)?;
    scratch.upload(&call.stream, key_blocks, blocks.key_blocks())?;
    scratch.upload(&call.stream, offsets, blocks.offsets())?;
    let params = BlockParams {
        attn: call.params(causal, scratch.at(next_item))?,
        key_blocks: scratch.at(key_blocks),
        block_offsets: scratch.at(offsets),
    };
    // SAFETY: BlockParams are what the kernel takes; the caller has checked the selection against the call, and the
    // scratch memory is released on this stream after the launch.
    unsafe { call.launch(Kernel::Block, &params, Grid::Persistent { items: blocks.len() }) }
}
