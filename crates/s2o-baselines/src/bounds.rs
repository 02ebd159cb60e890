//! What each query block sees of the key blocks, and what of that it always takes.

use candle_core::{Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, query_blocks};

use crate::error::BaselineError;
use crate::mask::Bands;

/// A few numbers for each query block of a call.
#[derive(Debug, Clone)]
pub(crate) struct QueryBounds {
    /// Columns seen, and of them taken the first, and those from one on to another.
    rows: Vec<[u32; 4]>,
}

impl QueryBounds {
    /// From how many key blocks the query blocks, counted on absolute positions, see, and what they always take.
    pub(crate) fn new(shape: &AttnShape, of_block: impl Fn(usize) -> (usize, Bands)) -> Self {
        let rows = query_blocks(shape, true).map(|rows| {
            let (seen, Bands { sink, window }) = of_block((shape.q_offset() + rows.start) / BLOCK_Q);
            [seen, sink, window.start, window.end].map(|blocks| blocks as u32)
        });
        Self { rows: rows.collect() }
    }

    /// As [`crate::causal_blocks`], nothing always taken.
    pub(crate) fn causal(shape: &AttnShape, block_k: usize) -> Self {
        Self::new(shape, |query_block| (seen_blocks(query_block, block_k), (0..0).into()))
    }

    /// `(query_blocks, 4)` of u32.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensor(&self, device: &Device) -> Result<Tensor, BaselineError> {
        Ok(Tensor::from_iter(self.rows.iter().flatten().copied(), device)?.reshape((self.rows.len(), 4))?)
    }

    /// `(query_blocks, key_blocks)` of u8: 1 where seen.
    pub(crate) fn seen(&self, key_blocks: usize, device: &Device) -> Result<Tensor, BaselineError> {
        self.below(0, key_blocks, device)
    }

    /// The same where always taken, seen or not.
    pub(crate) fn always(&self, key_blocks: usize, device: &Device) -> Result<Tensor, BaselineError> {
        let before_window = self.below(2, key_blocks, device)?;
        let window = self.below(3, key_blocks, device)?.gt(&before_window)?;
        Ok(self.below(1, key_blocks, device)?.maximum(&window)?)
    }

    /// Where a key block's number is below the bound.
    fn below(&self, bound: usize, key_blocks: usize, device: &Device) -> Result<Tensor, BaselineError> {
        let bounds: Vec<u32> = self.rows.iter().map(|row| row[bound]).collect();
        let bounds = Tensor::from_vec(bounds, (self.rows.len(), 1), device)?;
        Ok(Tensor::arange(0, key_blocks as u32, device)?.unsqueeze(0)?.broadcast_lt(&bounds)?)
    }
}

/// Key blocks that begin no later than a query block ends.
pub(crate) fn seen_blocks(query_block: usize, block_k: usize) -> usize {
    ((query_block + 1) * BLOCK_Q).div_ceil(block_k)
}
