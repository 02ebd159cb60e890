//! [`BlockMask`]: a choice of blocks as a tensor on the device of the call.

use candle_core::{D, DType, Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, BlockLists, BlockSelection, HeadWork, KeyColumns};

use crate::bounds::{bands, causal_bounds, seen};
use crate::error::BaselineError;
use crate::pooling::block_sums;

/// The key blocks that each query block attends to: `(batch, num_heads, query_blocks, key_blocks)` of u8, not 0 if it
/// does. Query blocks are those of [`candle_s2o::query_blocks`]; key blocks have `block_k` keys.
#[derive(Debug, Clone)]
pub struct BlockMask {
    mask: Tensor,
    block_k: usize,
    columns: Option<KeyColumns>,
}

impl BlockMask {
    /// Makes a mask for a call of `shape`. Clears the blocks of `mask` beyond the diagonal, so selectors can ignore it.
    ///
    /// # Errors
    /// If Candle fails; the sizes are checked when the mask is used.
    pub fn new(mask: &Tensor, shape: &AttnShape, block_k: usize) -> Result<Self, BaselineError> {
        let causal = causal_blocks(shape, block_k, mask.device())?;
        let mask = (mask.ne(0u8)? * causal.broadcast_as(mask.shape())?)?;
        Ok(Self { mask, block_k, columns: None })
    }

    /// Adds single keys.
    pub fn with_columns(self, columns: KeyColumns) -> Self {
        Self { columns: Some(columns), ..self }
    }

    /// A mask that is already 0 beyond the diagonal.
    pub(crate) fn within_diagonal(mask: Tensor, block_k: usize) -> Self {
        Self { mask, block_k, columns: None }
    }

    /// The mask as a tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.mask
    }

    /// The single keys in addition to the blocks.
    pub fn columns(&self) -> Option<&KeyColumns> {
        self.columns.as_ref()
    }

    /// The form that an executor takes: the mask itself on a GPU if `block_k` is 128, lists otherwise.
    ///
    /// # Errors
    /// As [`BlockMask::lists`].
    pub fn into_keys(self) -> Result<Keys, BaselineError> {
        if self.mask.device().is_cpu() || self.block_k != BLOCK_Q {
            return Ok(Keys::Lists(self.lists()?));
        }
        Ok(Keys::Mask(self))
    }

    /// The work by head (`b * num_heads + h`) of a causal call of `shape`, which fits the mask, counted as in
    /// [`candle_s2o::BlockSelection::work`]. Reads back one number per head.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn work(&self, shape: &AttnShape) -> Result<Vec<HeadWork>, BaselineError> {
        // Counts in f32 are exact below 2^24 blocks. Rows come first: a GPU uses one thread block per sum.
        let mut tiles = (self.mask.to_dtype(DType::F32)?.sum(3)?.sum(2)? * (self.block_k as f64 / BLOCK_Q as f64))?;
        if let Some(columns) = &self.columns {
            // If a head has too many keys, only the lists tell which of them are taken.
            let most = columns.keys.to_dtype(DType::F32)?.sum(2)?.flatten_all()?.to_vec1::<f32>()?;
            if most.iter().any(|&keys| keys as usize > columns.capacity(shape.k_len())) {
                return Ok(self.lists()?.work(shape));
            }
            tiles = (tiles + self.column_tiles(shape, columns)?)?;
        }
        let tiles = tiles.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from);
        Ok(HeadWork::dense(shape)
            .into_iter()
            .zip(tiles)
            .map(|(dense, visited)| HeadWork { visited, ..dense })
            .collect())
    }

    /// The number of tiles that the columns of a causal call fill, `(batch, num_heads)`. The columns of a query block
    /// are the keys before its first query that are in none of its key blocks.
    fn column_tiles(&self, shape: &AttnShape, columns: &KeyColumns) -> Result<Tensor, BaselineError> {
        let outside = self.mask.eq(0u8)?.to_dtype(DType::F32)?;
        let chosen = columns.keys.to_dtype(DType::F32)?;
        let earlier = bands(shape, BLOCK_Q, self.mask.device(), |query_block| (0..query_block).into())?;
        let seen = earlier.to_dtype(DType::F32)?.broadcast_mul(&block_sums(&chosen)?.unsqueeze(2)?)?;
        let mut seen = (&outside * seen)?.sum(D::Minus1)?;
        // A chunk may begin inside a key block.
        let (own, inside) = (shape.q_offset() / BLOCK_Q, shape.q_offset() % BLOCK_Q);
        if inside > 0 {
            let before = chosen.narrow(2, own * BLOCK_Q, inside)?.sum_keepdim(2)?;
            let of_first = (outside.narrow(2, 0, 1)?.narrow(3, own, 1)?.squeeze(3)? * before)?;
            seen = (&seen + of_first.pad_with_zeros(2, 0, seen.dim(2)? - 1)?)?;
        }
        Ok((seen / BLOCK_Q as f64)?.ceil()?.sum(2)?)
    }

    /// The choice as lists, read back from the device once.
    ///
    /// # Errors
    /// If Candle fails, or `block_k` is not a supported block size.
    pub fn lists(&self) -> Result<BlockSelection, BaselineError> {
        let mask = self.mask.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u8>()?;
        let key_blocks = self.mask.dim(3)?;
        let lists = mask.chunks_exact(key_blocks).map(|row| (0..key_blocks).filter(|&block| row[block] != 0));
        let columns = self.columns.as_ref().map(KeyColumns::lists).transpose()?;
        let blocks = BlockLists::new(lists).with_block_k(self.block_k)?;
        Ok(BlockSelection { columns, ..blocks.into() })
    }
}

/// The keys that each query block attends to, in the form that the executor of their device takes.
#[derive(Debug, Clone)]
pub enum Keys {
    /// Lists on the host, for [`candle_s2o::block_sparse_attn`].
    Lists(BlockSelection),
    /// A mask on the device of the tensors, for [`candle_s2o::block_mask_attn`].
    Mask(BlockMask),
}

impl Keys {
    /// The keys as lists. A mask is read back from its device.
    ///
    /// # Errors
    /// If Candle fails.
    pub fn lists(&self) -> Result<BlockSelection, BaselineError> {
        match self {
            Self::Lists(lists) => Ok(lists.clone()),
            Self::Mask(mask) => mask.lists(),
        }
    }
}

/// `(query_blocks, key_blocks)` of u8: 1 for the key blocks that start before the query block ends, both at absolute
/// positions and as whole blocks.
///
/// # Errors
/// If Candle fails.
pub fn causal_blocks(shape: &AttnShape, block_k: usize, device: &Device) -> Result<Tensor, BaselineError> {
    seen(&causal_bounds(shape, block_k, device)?, shape.k_len().div_ceil(block_k))
}

#[cfg(test)]
mod tests {
    use candle_s2o::{Mask, query_blocks};

    use super::*;

    #[test]
    fn the_work_is_that_of_the_lists() {
        for (q_len, k_len) in [(700, 700), (300, 500), (256, 640), (10, 130)] {
            let shape = AttnShape::new([2, q_len, 3, 64], [k_len, 1]).unwrap();
            let (rows, key_blocks) = (query_blocks(&shape, Mask::Causal).len(), k_len.div_ceil(BLOCK_Q));
            let spread = |len: usize, every: usize| (0..len).map(move |i| u8::from(i * 7 % 11 % every == 0));
            let mask: Vec<u8> = spread(6 * rows * key_blocks, 3).collect();
            let mask = Tensor::from_vec(mask, (2, 3, rows, key_blocks), &Device::Cpu).unwrap();
            // Spread over all keys, or only at their beginning.
            let early = (0..6 * k_len).map(|i| u8::from(i % k_len < 100)).collect();
            let keys = [spread(6 * k_len, 2).collect(), early]
                .map(|keys: Vec<u8>| Tensor::from_vec(keys, (2, 3, k_len), &Device::Cpu).unwrap());
            let mask = BlockMask::new(&mask, &shape, BLOCK_Q).unwrap();
            let blocks = mask.work(&shape).unwrap();
            assert_eq!(blocks, mask.lists().unwrap().work(&shape));
            for (keys, at_most) in keys.iter().flat_map(|keys| [(keys, usize::MAX), (keys, 1)]) {
                let mask = mask.clone().with_columns(KeyColumns { keys: keys.clone(), at_most });
                let work = mask.work(&shape).unwrap();
                assert_eq!(work, mask.lists().unwrap().work(&shape), "{q_len} of {k_len}, {at_most}");
                assert!(work.iter().zip(&blocks).any(|(work, blocks)| work.visited > blocks.visited));
            }
        }
    }

    #[test]
    fn half_blocks_are_half_the_work() {
        let shape = AttnShape::new([1, BLOCK_Q, 1, 64], [5 * BLOCK_Q, 1]).unwrap();
        let mask = Tensor::new(&[[[[1u8, 0, 1, 1, 0, 0, 0, 0, 1, 1]]]], &Device::Cpu).unwrap();
        let work = BlockMask::new(&mask, &shape, BLOCK_Q / 2).unwrap().work(&shape).unwrap();
        assert_eq!(work.iter().map(|head| head.visited).collect::<Vec<_>>(), [2.5]);
    }
}
