//! Attention on lists of blocks: what block-sparse methods select, computed by the engine of the others.

use s2o_kernels::params::BlockParams;
use s2o_kernels::{Kernel, TILE_K, TILE_Q};

use super::call::{Call, Grid};
use super::error::CudaError;
use super::memory::Regions;

/// Which key blocks each query block attends to. Blocks are of 128 queries and 128 keys; key blocks are cut from the
/// first key, query blocks at multiples of 128 of the ABSOLUTE position if causal, from the first query if not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLists {
    key_blocks: Vec<i32>,
    /// Where a list begins, and the end of the last.
    offsets: Vec<i64>,
}

impl BlockLists {
    /// One list for each (batch, head, query block), the query block innermost: numbers of key blocks, in any order,
    /// each once. Queries see nothing of a key block beyond their own position if the attention is causal, and a query
    /// block with an empty list gets zeros. The fit with a call is checked when it is used.
    pub fn new<L: IntoIterator<Item = usize>>(lists: impl IntoIterator<Item = L>) -> Self {
        let mut blocks = Self { key_blocks: Vec::new(), offsets: vec![0] };
        for list in lists {
            let start = blocks.key_blocks.len();
            // A number beyond i32 stays beyond every block count.
            blocks.key_blocks.extend(list.into_iter().map(|block| i32::try_from(block).unwrap_or(i32::MAX)));
            // Descending: the mask is in the first step of the kernel's loop.
            blocks.key_blocks[start..].sort_unstable_by(|a, b| b.cmp(a));
            blocks.offsets.push(blocks.key_blocks.len() as i64);
        }
        blocks
    }

    /// Checks the number of lists, and each list against the diagonal or the number of key blocks.
    fn check(&self, call: &Call, causal: bool) -> Result<(), CudaError> {
        let shape = &call.shape;
        let offset = if causal { shape.kv_offset() } else { 0 };
        let first = offset / TILE_Q;
        let query_blocks = (offset + shape.q_len()).div_ceil(TILE_Q) - first;
        let expected = shape.batch() * shape.num_heads() * query_blocks;
        let got = self.offsets.len() - 1;
        if got != expected {
            return Err(CudaError::Keys { name: "block lists", expected: expected.to_string(), got });
        }
        let key_blocks = shape.k_len().div_ceil(TILE_K);
        for (i, ends) in self.offsets.windows(2).enumerate() {
            let list = &self.key_blocks[ends[0] as usize..ends[1] as usize];
            let below = if causal { first + i % query_blocks + 1 } else { key_blocks };
            if let Some(&block) = list.iter().find(|&&block| block as usize >= below) {
                let expected = format!("blocks below {below} in list {i}");
                return Err(CudaError::Keys { name: "key block", expected, got: block as usize });
            }
            if let Some(pair) = list.windows(2).find(|pair| pair[0] == pair[1]) {
                let expected = format!("each block once in list {i}");
                return Err(CudaError::Keys { name: "key block", expected, got: pair[0] as usize });
            }
        }
        Ok(())
    }
}

/// Attention on `blocks`.
pub(crate) fn attend(call: &Call, causal: bool, blocks: &BlockLists) -> Result<(), CudaError> {
    blocks.check(call, causal)?;
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let key_blocks = regions.add::<i32>(blocks.key_blocks.len());
    let offsets = regions.add::<i64>(blocks.offsets.len());
    let scratch = call.allocate(&regions)?;
    scratch.zero(&call.stream, next_item)?;
    scratch.upload(&call.stream, key_blocks, &blocks.key_blocks)?;
    scratch.upload(&call.stream, offsets, &blocks.offsets)?;
    let params = BlockParams {
        attn: call.params(causal, scratch.at(next_item))?,
        key_blocks: scratch.at(key_blocks),
        block_offsets: scratch.at(offsets),
    };
    // SAFETY: BlockParams are what the kernel takes; the lists were checked against the call, and the scratch memory is
    // released on this stream after the launch.
    unsafe { call.launch(Kernel::Block, &params, Grid::Persistent { items: blocks.offsets.len() - 1 }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_descend_and_follow_each_other() {
        let blocks = BlockLists::new([vec![0, 2, 1], vec![], vec![5]]);
        assert_eq!(blocks.key_blocks, [2, 1, 0, 5]);
        assert_eq!(blocks.offsets, [0, 3, 3, 4]);
    }
}
