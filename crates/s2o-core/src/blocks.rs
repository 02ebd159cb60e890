//! [`BlockSelection`]: the keys that a block-sparse method selects, in the form that the executors read.

use std::ops::Range;

use thiserror::Error;

use crate::probes::ProbeStats;
use crate::segment::{causal_tiles, position_tiles};
use crate::shape::{AttnShape, Mask};

/// Number of queries in a query block.
pub const BLOCK_Q: usize = 128;

/// The reason a selection was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum BlockError {
    /// The key block size does not divide [`BLOCK_Q`], or is below 16.
    #[error("block_k: expected a divisor of {BLOCK_Q} that is at least 16, got {got}")]
    BlockK { got: usize },
    /// The number of lists is not the number of query blocks of all heads and sequences.
    #[error("block lists: expected {expected}, got {got}")]
    ListCount { expected: usize, got: usize },
    /// A block mask does not have one entry for each key block of each query block.
    #[error("block mask: expected (batch, num_heads, query blocks, key blocks) {expected:?}, got {got:?}")]
    Mask { expected: [usize; 4], got: Vec<usize> },
    /// A choice of single keys does not have one entry for each key.
    #[error("columns: expected (batch, num_heads, k_len) {expected:?}, got {got:?}")]
    ColumnMask { expected: [usize; 3], got: Vec<usize> },
    /// A key block does not exist or lies beyond the diagonal.
    #[error("key block of list {list}: expected blocks below {below}, got {got}")]
    KeyBlock { list: usize, below: usize, got: usize },
    /// A list contains a key block twice.
    #[error("key blocks of list {list}: expected each once, got {got} twice")]
    Repeated { list: usize, got: usize },
    /// The number of column lists is not the number of heads of all sequences.
    #[error("columns: expected a list for each of {expected} heads, got {got}")]
    ColumnCount { expected: usize, got: usize },
    /// The columns of a head (`b * num_heads + h`) do not ascend, or a column is not a key.
    #[error("columns of head {head}: expected ascending keys below {below}, got {got}")]
    Column { head: usize, below: usize, got: usize },
    /// Columns were given for attention that is not causal.
    #[error("columns: expected causal attention, got attention to all keys")]
    ColumnsNotCausal,
}

/// The key blocks that each query block attends to. A query block has [`BLOCK_Q`] queries. A key block has [`BLOCK_Q`]
/// keys unless [`BlockLists::with_block_k`] changes it. Key blocks are cut from the first key. Query blocks are cut at
/// multiples of [`BLOCK_Q`] of the ABSOLUTE position under [`Mask::Causal`], from the first query under [`Mask::Full`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLists {
    block_k: usize,
    key_blocks: Vec<i32>,
    /// Start of each list in `key_blocks`, then the end of the last list.
    offsets: Vec<i64>,
}

impl BlockLists {
    /// Takes one list of key block numbers for each (batch, head, query block), the query block innermost. A list has
    /// any order and contains each number at most once. A query block with an empty list gets zeros. In causal
    /// attention, no query sees keys beyond its own position. The lists are checked against a call when they are used.
    pub fn new<L: IntoIterator<Item = usize>>(lists: impl IntoIterator<Item = L>) -> Self {
        let mut blocks = Self { block_k: BLOCK_Q, key_blocks: Vec::new(), offsets: vec![0] };
        for list in lists {
            let start = blocks.key_blocks.len();
            // A number too large for i32 becomes one that is above every block count.
            blocks.key_blocks.extend(list.into_iter().map(|block| i32::try_from(block).unwrap_or(i32::MAX)));
            // Descending, so that the kernel's loop needs the mask in its first step.
            blocks.key_blocks[start..].sort_unstable_by(|a, b| b.cmp(a));
            blocks.offsets.push(blocks.key_blocks.len() as i64);
        }
        blocks
    }

    /// The same numbers, now counting key blocks of `block_k` keys.
    ///
    /// # Errors
    /// [`BlockError::BlockK`] unless `block_k` divides [`BLOCK_Q`] and is at least 16.
    pub fn with_block_k(self, block_k: usize) -> Result<Self, BlockError> {
        if block_k < 16 || !BLOCK_Q.is_multiple_of(block_k) {
            return Err(BlockError::BlockK { got: block_k });
        }
        Ok(Self { block_k, ..self })
    }

    /// Number of keys in a key block.
    pub fn block_k(&self) -> usize {
        self.block_k
    }

    /// Number of lists.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there are no lists.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The key blocks of list `i`, descending.
    pub fn list(&self, i: usize) -> &[i32] {
        &self.key_blocks[self.offsets[i] as usize..self.offsets[i + 1] as usize]
    }

    /// All lists concatenated, each descending, in the layout that the kernels read.
    pub fn key_blocks(&self) -> &[i32] {
        &self.key_blocks
    }

    /// Start of each list in [`BlockLists::key_blocks`], then the end of the last list.
    pub fn offsets(&self) -> &[i64] {
        &self.offsets
    }

    /// Checks the number of lists, and each list against the diagonal (if causal) and the number of key blocks.
    ///
    /// # Errors
    /// A [`BlockError`] that names the list at fault.
    pub fn check(&self, shape: &AttnShape, mask: Mask) -> Result<(), BlockError> {
        let cut: Vec<_> = query_blocks(shape, mask).collect();
        let expected = shape.batch() * shape.num_heads() * cut.len();
        if self.len() != expected {
            return Err(BlockError::ListCount { expected, got: self.len() });
        }
        let key_blocks = shape.k_len().div_ceil(self.block_k);
        for list in 0..self.len() {
            // A ragged last query block may list every existing key block that a full query block could see.
            let query_block = (shape.q_offset() + cut[list % cut.len()].start) / BLOCK_Q;
            let diagonal = (query_block + 1) * (BLOCK_Q / self.block_k);
            let below = if mask.is_causal() { diagonal.min(key_blocks) } else { key_blocks };
            let blocks = self.list(list);
            if let Some(&block) = blocks.iter().find(|&&block| block as usize >= below) {
                return Err(BlockError::KeyBlock { list, below, got: block as usize });
            }
            if let Some(pair) = blocks.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(BlockError::Repeated { list, got: pair[0] as usize });
            }
        }
        Ok(())
    }
}

/// The query blocks of a call, as ranges of its query rows.
pub fn query_blocks(shape: &AttnShape, mask: Mask) -> impl ExactSizeIterator<Item = Range<usize>> {
    let offset = if mask.is_causal() { shape.q_offset() } else { 0 };
    position_tiles(0..shape.q_len(), offset, BLOCK_Q)
}

/// The keys that a block-sparse method selects: key blocks, and optionally single keys and a value threshold.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSelection {
    /// Key blocks of every query block.
    pub blocks: BlockLists,
    /// Single keys for each batch and head (`b * num_heads + h`), ascending. A query block sees those that lie before
    /// its own first query and outside its key blocks.
    pub columns: Option<Vec<Vec<u32>>>,
    /// Skips the values of a key block for 32 consecutive queries if each query's largest score, relative to its
    /// running maximum, is below this (in nats, so negative). The block still counts in the softmax denominator.
    pub value_threshold: Option<f32>,
}

impl From<BlockLists> for BlockSelection {
    fn from(blocks: BlockLists) -> Self {
        Self { blocks, columns: None, value_threshold: None }
    }
}

impl BlockSelection {
    /// Checks the selection against a call.
    ///
    /// # Errors
    /// A [`BlockError`] that names the list or column at fault.
    pub fn check(&self, shape: &AttnShape, mask: Mask) -> Result<(), BlockError> {
        self.blocks.check(shape, mask)?;
        let Some(columns) = &self.columns else { return Ok(()) };
        if !mask.is_causal() {
            return Err(BlockError::ColumnsNotCausal);
        }
        let expected = shape.batch() * shape.num_heads();
        if columns.len() != expected {
            return Err(BlockError::ColumnCount { expected, got: columns.len() });
        }
        for (head, columns) in columns.iter().enumerate() {
            let below = shape.k_len();
            let unordered = columns.windows(2).find(|pair| pair[0] >= pair[1]).map(|pair| pair[1]);
            let beyond = columns.last().copied().filter(|&column| column as usize >= below);
            if let Some(got) = unordered.or(beyond) {
                return Err(BlockError::Column { head, below, got: got as usize });
            }
        }
        Ok(())
    }

    /// The columns that query block `list` of `head` sees. `first` is the position of its first query.
    pub(crate) fn columns_of(&self, head: usize, list: usize, first: usize) -> Vec<usize> {
        let Some(columns) = &self.columns else { return Vec::new() };
        let columns = &columns[head];
        let before = &columns[..columns.partition_point(|&column| (column as usize) < first)];
        let (blocks, block_k) = (self.blocks.list(list), self.blocks.block_k);
        let mut seen: Vec<usize> = before.iter().map(|&column| column as usize).collect();
        seen.retain(|column| blocks.binary_search_by(|block| (column / block_k).cmp(&(*block as usize))).is_err());
        seen
    }

    /// The work of each head (`b * num_heads + h`) in a causal call of `shape`, which must fit the selection.
    pub fn work(&self, shape: &AttnShape) -> Vec<HeadWork> {
        let cut: Vec<_> = query_blocks(shape, Mask::Causal).collect();
        let offset = shape.q_offset();
        let causal = causal_work(shape);
        (0..shape.batch() * shape.num_heads())
            .map(|head| {
                let visited = cut.iter().enumerate().map(|(i, rows)| {
                    let list = head * cut.len() + i;
                    let columns = self.columns_of(head, list, offset + rows.start).len();
                    let blocks = self.blocks.list(list).len() * self.blocks.block_k;
                    blocks as f64 / BLOCK_Q as f64 + columns.div_ceil(BLOCK_Q) as f64
                });
                HeadWork::of_tiles(visited.sum(), causal)
            })
            .collect()
    }
}

/// Number of tiles that dense causal attention computes per head.
fn causal_work(shape: &AttnShape) -> usize {
    query_blocks(shape, Mask::Causal).map(|rows| causal_tiles(0, shape.q_offset() + rows.end - 1, BLOCK_Q)).sum()
}

/// The work of one head in tiles of [`BLOCK_Q`] queries and keys, counted as for S2O. A smaller block counts as a
/// fraction of a tile. Gathered columns count as whole tiles.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HeadWork {
    /// Number of computed tiles.
    pub visited: f64,
    /// Number of tiles that dense causal attention computes.
    pub causal: usize,
    /// What S2O's probes measured.
    pub probes: Option<ProbeStats>,
}

impl HeadWork {
    /// The work of a method without probes.
    pub fn of_tiles(visited: f64, causal: usize) -> Self {
        Self { visited, causal, probes: None }
    }

    /// The work of dense causal attention, by head (`b * num_heads + h`).
    pub fn dense(shape: &AttnShape) -> Vec<Self> {
        let causal = causal_work(shape);
        vec![Self::of_tiles(causal as f64, causal); shape.batch() * shape.num_heads()]
    }

    /// Ratio of visited tiles to causal tiles.
    pub fn density(&self) -> f64 {
        if self.causal == 0 { 1.0 } else { self.visited / self.causal as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(q_len: usize, k_len: usize) -> AttnShape {
        AttnShape::new([1, q_len, 1, 64], [k_len, 1]).unwrap()
    }

    #[test]
    fn lists_descend_and_follow_each_other() {
        let blocks = BlockLists::new([vec![0, 2, 1], vec![], vec![5]]);
        assert_eq!(blocks.key_blocks(), [2, 1, 0, 5]);
        assert_eq!(blocks.offsets(), [0, 3, 3, 4]);
        assert_eq!((blocks.len(), blocks.list(0)), (3, &[2, 1, 0][..]));
        assert!(!blocks.is_empty() && BlockLists::new([[0; 0]; 0]).is_empty());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let refused =
            |lists: Vec<Vec<usize>>| BlockLists::new(lists).check(&shape(256, 256), Mask::Causal).unwrap_err();
        assert_eq!(refused(vec![vec![0]]), BlockError::ListCount { expected: 2, got: 1 });
        assert_eq!(refused(vec![vec![1], vec![0]]), BlockError::KeyBlock { list: 0, below: 1, got: 1 });
        let beyond = BlockError::KeyBlock { list: 1, below: 2, got: i32::MAX as usize };
        assert_eq!(refused(vec![vec![0], vec![usize::MAX]]), beyond);
        assert_eq!(refused(vec![vec![0], vec![1, 0, 1]]), BlockError::Repeated { list: 1, got: 1 });
        for got in [0, 8, 96, 256] {
            assert_eq!(BlockLists::new([[0]]).with_block_k(got), Err(BlockError::BlockK { got }));
        }
        for block_k in [16, 128] {
            assert_eq!(BlockLists::new([[0]]).with_block_k(block_k).map(|blocks| blocks.block_k()), Ok(block_k));
        }
        // The chunk begins inside block 1. Blocks of 64 keys are numbered from the first key.
        let chunk = BlockLists::new([vec![3], vec![4]]).with_block_k(64).unwrap();
        assert_eq!(chunk.check(&shape(100, 300), Mask::Causal), Ok(()));
        assert_eq!(
            BlockLists::new([vec![4], vec![4]]).with_block_k(64).unwrap().check(&shape(100, 300), Mask::Causal),
            Err(BlockError::KeyBlock { list: 0, below: 4, got: 4 })
        );
    }

    #[test]
    fn columns_must_ascend() {
        let with = |columns: Vec<Vec<u32>>| BlockSelection {
            columns: Some(columns),
            ..BlockLists::new([vec![0], vec![1]]).into()
        };
        let check = |columns| with(columns).check(&shape(256, 256), Mask::Causal);
        assert_eq!(check(vec![vec![0, 3, 255]]), Ok(()));
        assert_eq!(check(vec![]), Err(BlockError::ColumnCount { expected: 1, got: 0 }));
        assert_eq!(check(vec![vec![3, 3]]), Err(BlockError::Column { head: 0, below: 256, got: 3 }));
        assert_eq!(check(vec![vec![256]]), Err(BlockError::Column { head: 0, below: 256, got: 256 }));
        assert_eq!(with(vec![vec![]]).check(&shape(256, 256), Mask::Full), Err(BlockError::ColumnsNotCausal));
    }

    #[test]
    fn work_counts_blocks_by_size_and_columns_in_tiles() {
        let blocks = BlockLists::new([vec![0, 1], vec![0, 3], vec![4, 5]]).with_block_k(64).unwrap();
        let columns = Some(vec![(60..200).collect()]);
        let selection = BlockSelection { columns, ..blocks.into() };
        // The second list lacks the columns 64..128, which is one tile. The third lacks 60..200, which is two tiles.
        let work = HeadWork { visited: 1.0 + (1.0 + 1.0) + (1.0 + 2.0), causal: 6, probes: None };
        assert_eq!(selection.work(&shape(384, 384)), [work]);
        assert_eq!(selection.columns_of(0, 1, 128), (64..128).collect::<Vec<_>>());
    }

    #[test]
    fn each_head_of_a_chunk_has_its_own_work() {
        // Two query blocks from position 128 on, which see two and three tiles.
        let chunk = AttnShape::new([1, 256, 2, 64], [384, 1]).unwrap();
        let blocks = BlockLists::new([vec![0, 1], vec![2], vec![], vec![]]);
        let selection = BlockSelection { columns: Some(vec![vec![], vec![5, 200]]), ..blocks.into() };
        // The first query block of the second head sees column 5, the second sees both.
        let work = [3.0, 1.0 + 1.0].map(|visited| HeadWork::of_tiles(visited, 5));
        assert_eq!(selection.work(&chunk), work);
        assert_eq!(HeadWork::dense(&chunk), [HeadWork::of_tiles(5.0, 5); 2]);
        assert_eq!([work[0].density(), HeadWork::default().density()], [0.6, 1.0]);
    }
}
