//! Attention to blocks that block-sparse methods select, with the engine of the other ops.

use candle_core::Tensor;
use s2o_core::{BLOCK_Q, BlockSelection, Mask, S2oError};
use s2o_cuda::{CudaError, Grid, Region, Regions, Scratch, to_i32, unaligned_address};
use s2o_kernels::Kernel;
use s2o_kernels::params::{BlockListParams, BlockParams, ColumnListParams, ColumnParams};

use super::call::{Call, CudaOp};
use crate::error::AttnError;
use crate::ops::{BlockOp, KeyColumns, MaskOp};

impl CudaOp for BlockOp {
    fn run(&self, call: &Call) -> Result<Vec<f64>, AttnError> {
        self.selection.check(&call.shape, self.mask).map_err(S2oError::from)?;
        launch_lists(call, self.mask, &self.selection)?;
        Ok(vec![0.0; call.shape.batch() * call.shape.num_heads()])
    }
}

impl CudaOp for MaskOp {
    fn run(&self, call: &Call) -> Result<(), AttnError> {
        self.check(&call.shape)?;
        Ok(launch_mask(call, self.mask, &self.blocks, self.columns.as_ref())?)
    }
}

/// Lists that the kernel reads, in scratch memory.
struct Lists {
    next_item: Region<i32>,
    key_blocks: Region<i32>,
    /// Begin and end of each list.
    ranges: Region<i64>,
    scratch: Scratch,
}

impl Lists {
    fn allocate(call: &Call, entries: usize, lists: usize) -> Result<Self, CudaError> {
        let mut regions = Regions::default();
        let (next_item, key_blocks) = (regions.add(1), regions.add(entries));
        let ranges = regions.add(2 * lists);
        let scratch = call.allocate(&regions)?;
        scratch.zero(next_item)?;
        Ok(Self { next_item, key_blocks, ranges, scratch })
    }

    fn params(&self, call: &Call, mask: Mask) -> Result<BlockParams, CudaError> {
        let scratch = &self.scratch;
        Ok(BlockParams {
            attn: call.params(mask, scratch.at(self.next_item))?,
            key_blocks: scratch.at(self.key_blocks),
            block_ranges: scratch.at(self.ranges),
        })
    }

    /// Attention to the lists, which must fit the call.
    fn attend(&self, call: &Call, mask: Mask) -> Result<(), CudaError> {
        let params = self.params(call, mask)?;
        // SAFETY: the kernel takes BlockParams. The lists name only blocks of the call, and the scratch memory is
        // released on this stream after the launch.
        unsafe { call.launch(Kernel::Block, &params, Grid::Persistent { items: self.ranges.len / 2 }) }
    }
}

/// Attention to a selection that fits the call.
fn launch_lists(call: &Call, mask: Mask, selection: &BlockSelection) -> Result<(), CudaError> {
    let blocks = &selection.blocks;
    if blocks.block_k() != BLOCK_Q {
        return Err(CudaError::Tile { name: "block_k", got: blocks.block_k() });
    }
    for (what, given) in
        [("selected columns", selection.columns.is_some()), ("value threshold", selection.value_threshold.is_some())]
    {
        if given {
            return Err(CudaError::CpuOnly { what });
        }
    }
    let lists = Lists::allocate(call, blocks.key_blocks().len(), blocks.len())?;
    let ranges: Vec<i64> = blocks.offsets().windows(2).flatten().copied().collect();
    lists.scratch.upload(lists.key_blocks, blocks.key_blocks())?;
    lists.scratch.upload(lists.ranges, &ranges)?;
    lists.attend(call, mask)
}

/// Attention to the blocks of a mask of u8 and to single keys, both of which fit the call and are contiguous.
fn launch_mask(call: &Call, mask: Mask, blocks: &Tensor, columns: Option<&KeyColumns>) -> Result<(), CudaError> {
    let (batch, heads, query_blocks, mask_blocks) = blocks.dims4()?;
    let num_lists = batch * heads * query_blocks;
    let lists = Lists::allocate(call, num_lists * mask_blocks, num_lists)?;
    let storage = blocks.storage_and_layout();
    let (blocks, _blocks) = unaligned_address::<u8>(&storage.0, storage.1, call.launcher.stream())?;
    let offset = if mask.is_causal() { call.shape.q_offset() } else { 0 };
    let params = BlockListParams {
        mask: blocks as *const u8,
        key_blocks: lists.scratch.at(lists.key_blocks),
        block_ranges: lists.scratch.at(lists.ranges),
        num_lists: to_i32("block lists", num_lists)?,
        query_blocks: to_i32("query blocks", query_blocks)?,
        mask_blocks: to_i32("key blocks", mask_blocks)?,
        first_tile: to_i32("query blocks", offset / BLOCK_Q)?,
        causal: i32::from(mask.is_causal()),
    };
    // SAFETY: the kernel takes BlockListParams. The mask has every entry that the kernel reads and is held until the
    // launch is enqueued, and the lists have room for all blocks.
    unsafe { call.launch(Kernel::BlockLists, &params, Grid::Warps { rows: num_lists }) }?;
    let Some(columns) = columns else { return lists.attend(call, mask) };

    let capacity = columns.capacity(call.shape.k_len());
    let mut regions = Regions::default();
    let (head_columns, head_counts) = (regions.add::<i32>(batch * heads * capacity), regions.add::<i32>(batch * heads));
    let (of_lists, counts) = (regions.add::<i32>(num_lists * capacity), regions.add::<i32>(num_lists));
    let scratch = call.allocate(&regions)?;
    let storage = columns.keys.storage_and_layout();
    let (keys, _keys) = unaligned_address::<u8>(&storage.0, storage.1, call.launcher.stream())?;
    let list_params = ColumnListParams {
        keys: keys as *const u8,
        mask: params.mask,
        head_columns: scratch.at(head_columns),
        head_counts: scratch.at(head_counts),
        columns: scratch.at(of_lists),
        column_counts: scratch.at(counts),
        column_stride: capacity as i64,
        k_len: to_i32("k_len", call.shape.k_len())?,
        query_blocks: params.query_blocks,
        mask_blocks: params.mask_blocks,
        num_lists: params.num_lists,
        q_offset: to_i32("k_len", offset)?,
    };
    // SAFETY: both kernels take ColumnListParams. The masks have every entry that the kernels read and are held until
    // the launches are enqueued. The kernels drop keys of a head that do not fit its lists.
    unsafe {
        call.launch(Kernel::HeadColumns, &list_params, Grid::Blocks([batch * heads, 1, 1]))?;
        call.launch(Kernel::ColumnLists, &list_params, Grid::Warps { rows: num_lists })?;
    }
    let params = ColumnParams {
        block: lists.params(call, mask)?,
        columns: list_params.columns,
        column_counts: list_params.column_counts,
        column_stride: list_params.column_stride,
    };
    // SAFETY: as for the blocks alone. The columns are keys of the call, released on this stream after the launch.
    unsafe { call.launch(Kernel::BlockColumns, &params, Grid::Persistent { items: num_lists }) }
}
