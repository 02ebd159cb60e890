//! Attention on blocks: what block-sparse methods select, computed by the engine of the others.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{Storage, Tensor};
use s2o::{BLOCK_Q, BlockSelection};
use s2o_kernels::Kernel;
use s2o_kernels::params::{BlockListParams, BlockParams};

use super::call::{Call, Grid};
use super::error::{CudaError, int};
use super::memory::{Region, Regions, Scratch};
use crate::error::AttnError;

/// What the kernel reads, in scratch memory.
struct Lists {
    next_item: Region<i32>,
    key_blocks: Region<i32>,
    /// Where each list begins and ends.
    ranges: Region<i64>,
    scratch: Scratch,
}

impl Lists {
    fn allocate(call: &Call, entries: usize, lists: usize) -> Result<Self, CudaError> {
        let mut regions = Regions::default();
        let (next_item, key_blocks) = (regions.add(1), regions.add(entries));
        let ranges = regions.add(2 * lists);
        let scratch = call.allocate(&regions)?;
        scratch.zero(&call.stream, next_item)?;
        Ok(Self { next_item, key_blocks, ranges, scratch })
    }

    /// Attention to the lists, which fit the call.
    fn attend(&self, call: &Call, causal: bool) -> Result<(), CudaError> {
        let scratch = &self.scratch;
        let params = BlockParams {
            attn: call.params(causal, scratch.at(self.next_item))?,
            key_blocks: scratch.at(self.key_blocks),
            block_ranges: scratch.at(self.ranges),
        };
        // SAFETY: BlockParams are what the kernel takes; the lists name blocks of the call only, and the scratch memory is
        // released on this stream after the launch.
        unsafe { call.launch(Kernel::Block, &params, Grid::Persistent { items: self.ranges.len / 2 }) }
    }
}

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
    let lists = Lists::allocate(call, blocks.key_blocks().len(), blocks.len())?;
    let ranges: Vec<i64> = blocks.offsets().windows(2).flatten().copied().collect();
    lists.scratch.upload(&call.stream, lists.key_blocks, blocks.key_blocks())?;
    lists.scratch.upload(&call.stream, lists.ranges, &ranges)?;
    lists.attend(call, causal)
}

/// Attention to the blocks of a mask of u8 that fits the call, contiguous.
pub(crate) fn attend_mask(call: &Call, causal: bool, mask: &Tensor) -> Result<(), AttnError> {
    let (batch, heads, query_blocks, mask_blocks) = mask.dims4()?;
    let num_lists = batch * heads * query_blocks;
    let lists = Lists::allocate(call, num_lists * mask_blocks, num_lists)?;
    let (storage, layout) = mask.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(candle_core::Error::Msg("expected a mask on the GPU of q".to_owned()).bt().into());
    };
    debug_assert!(layout.is_contiguous() && storage.dtype() == candle_core::DType::U8);
    let (base, _mask) = storage.as_cuda_slice::<u8>()?.device_ptr(&call.stream);
    let params = BlockListParams {
        mask: (base + layout.start_offset() as u64) as *const u8,
        key_blocks: lists.scratch.at(lists.key_blocks),
        block_ranges: lists.scratch.at(lists.ranges),
        num_lists: int("block lists", num_lists)?,
        query_blocks: int("query blocks", query_blocks)?,
        mask_blocks: int("key blocks", mask_blocks)?,
        first_tile: int("query blocks", if causal { call.shape().kv_offset() / BLOCK_Q } else { 0 })?,
        causal: i32::from(causal),
    };
    // SAFETY: BlockListParams are what the kernel takes; the mask has an entry for each that it reads and is held until the
    // launch is enqueued, and the lists have room for all of them.
    unsafe { call.launch(Kernel::BlockLists, &params, Grid::Warps { rows: num_lists }) }?;
    Ok(lists.attend(call, causal)?)
}
