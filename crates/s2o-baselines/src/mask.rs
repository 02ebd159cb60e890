//! [`BlockMask`]: a choice of blocks as a tensor, where the selectors compute it.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, BlockLists, BlockSelection, HeadWork, query_blocks};

use crate::bounds::QueryBounds;
use crate::error::BaselineError;

/// Which key blocks each query block attends to: `(batch, num_heads, query_blocks, key_blocks)` of u8, not 0 where it
/// does. Query blocks are those of [`query_blocks`], key blocks of `block_k` keys from the first key on.
#[derive(Debug, Clone)]
pub struct BlockMask {
    mask: Tensor,
    block_k: usize,
}

impl BlockMask {
    /// Blocks beyond the diagonal are taken out of `mask`, so a selector need not look at it. `shape` is that of the call.
    ///
    /// # Errors
    /// If Candle fails; the sizes are checked when the mask is used.
    pub fn new(mask: &Tensor, shape: &AttnShape, block_k: usize) -> Result<Self, BaselineError> {
        let causal = causal_blocks(shape, block_k, mask.device())?;
        let mask = (mask.ne(0u8)? * causal.broadcast_as(mask.shape())?)?;
        Ok(Self { mask, block_k })
    }

    /// A mask with nothing beyond the diagonal.
    pub(crate) fn within_diagonal(mask: Tensor, block_k: usize) -> Self {
        Self { mask, block_k }
    }

    /// The mask as a tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.mask
    }

    /// Also the blocks of `other`: a `(query_blocks, key_blocks)` mask for all heads, or one like this.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn or(&self, other: &Tensor) -> Result<Self, BaselineError> {
        let mask = self.mask.maximum(&other.ne(0u8)?.broadcast_as(self.mask.shape())?)?;
        Ok(Self { mask, block_k: self.block_k })
    }

    /// What an executor takes: the mask itself on a GPU that knows blocks of its size, lists otherwise.
    ///
    /// # Errors
    /// As [`BlockMask::lists`].
    pub fn into_keys(self) -> Result<Keys, BaselineError> {
        if self.mask.device().is_cpu() || self.block_k != BLOCK_Q {
            return Ok(Keys::Lists(self.lists()?.into()));
        }
        Ok(Keys::Mask(self))
    }

    /// The work of a causal call of `shape`, which fits the mask, by head (`b * num_heads + h`), as
    /// [`candle_s2o::BlockSelection::work`] counts it. One number a head is read back.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn work(&self, shape: &AttnShape) -> Result<Vec<HeadWork>, BaselineError> {
        // In f32 a row's count is exact, and so is a head's below 2^24 blocks.
        let counts = self.mask.to_dtype(DType::F32)?.sum((2, 3))?.flatten_all()?.to_vec1::<f32>()?;
        let tile = self.block_k as f64 / BLOCK_Q as f64;
        let counts = counts.into_iter().map(|count| f64::from(count) * tile);
        Ok(HeadWork::dense(shape)
            .into_iter()
            .zip(counts)
            .map(|(dense, visited)| HeadWork { visited, ..dense })
            .collect())
    }

    /// The choice as lists. The mask is read back from its device, once.
    ///
    /// # Errors
    /// If Candle fails, or `block_k` is no block size.
    pub fn lists(&self) -> Result<BlockLists, BaselineError> {
        let key_blocks = self.mask.dim(3)?;
        let mask = self.mask.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u8>()?;
        let lists = mask.chunks_exact(key_blocks).map(|row| (0..key_blocks).filter(|&block| row[block] != 0));
        Ok(BlockLists::new(lists).with_block_k(self.block_k)?)
    }
}

/// The keys that each query block attends to, in the form in which the executor of their device wants them.
#[derive(Debug, Clone)]
pub enum Keys {
    /// On the host: [`candle_s2o::block_sparse_attn`].
    Lists(BlockSelection),
    /// Where the tensors are: [`candle_s2o::block_mask_attn`].
    Mask(BlockMask),
}

impl Keys {
    /// The lists; those of a mask are read back from its device.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn lists(&self) -> Result<BlockSelection, BaselineError> {
        match self {
            Self::Lists(lists) => Ok(lists.clone()),
            Self::Mask(mask) => Ok(mask.lists()?.into()),
        }
    }
}

/// `(query_blocks, key_blocks)` of u8: 1 for the key blocks that begin no later than the query block ends, as positions
/// of whole blocks.
///
/// # Errors
/// If Candle fails.
pub fn causal_blocks(shape: &AttnShape, block_k: usize, device: &Device) -> Result<Tensor, BaselineError> {
    QueryBounds::causal(shape, block_k).seen(shape.k_len().div_ceil(block_k), device)
}

/// Key blocks of a query block: a range, and some first ones.
pub(crate) struct Bands {
    /// The first `sink` key blocks.
    pub(crate) sink: usize,
    pub(crate) window: Range<usize>,
}

impl From<Range<usize>> for Bands {
    fn from(window: Range<usize>) -> Self {
        Self { sink: 0, window }
    }
}

/// The first block and the one on the diagonal, both of [`BLOCK_Q`] keys: what several methods always take.
pub(crate) fn first_and_own(query_block: usize) -> Bands {
    Bands { sink: 1, window: query_block..query_block + 1 }
}

/// `(query_blocks, key_blocks)` of u8: 1 in the bands of each query block, counted on absolute positions as the key
/// blocks are. Made on the device from three numbers a query block.
pub(crate) fn bands(
    shape: &AttnShape,
    block_k: usize,
    device: &Device,
    of_block: impl Fn(usize) -> Bands,
) -> Result<Tensor, BaselineError> {
    let rows: Vec<Bands> =
        query_blocks(shape, true).map(|rows| of_block((shape.kv_offset() + rows.start) / BLOCK_Q)).collect();
    let column = |number: fn(&Bands) -> usize| {
        let numbers: Vec<u32> = rows.iter().map(|bands| number(bands) as u32).collect();
        Tensor::from_vec(numbers, (rows.len(), 1), device)
    };
    let key_blocks = Tensor::arange(0, shape.k_len().div_ceil(block_k) as u32, device)?.unsqueeze(0)?;
    let first = key_blocks.broadcast_lt(&column(|bands| bands.sink)?)?;
    let from = key_blocks.broadcast_ge(&column(|bands| bands.window.start)?)?;
    let window = (from * key_blocks.broadcast_lt(&column(|bands| bands.window.end)?)?)?;
    Ok(first.maximum(&window)?)
}
