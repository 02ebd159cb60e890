//! Key blocks that each query block sees, and key blocks that it always takes.

use std::ops::Range;

use candle_core::{D, Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, Mask, query_blocks};

use crate::error::BaselineError;

/// Key blocks of a query block: the first `sink` blocks, and a range.
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

/// The first block and the diagonal block, both of [`BLOCK_Q`] keys, which several methods always take.
pub(crate) fn first_and_own(query_block: usize) -> Bands {
    Bands { sink: 1, window: query_block..query_block + 1 }
}

/// `[seen, sink, from, to]` for each query block, `(query_blocks, 4)` of u32: only key blocks `0..seen` may be chosen;
/// `0..sink` and `from..to` always are. `of_block` gives them for a query block, numbered by absolute position.
pub(crate) fn query_bounds(
    shape: &AttnShape,
    device: &Device,
    of_block: impl Fn(usize) -> (usize, Bands),
) -> Result<Tensor, BaselineError> {
    let rows = query_blocks(shape, Mask::Causal).map(|rows| {
        let (seen, Bands { sink, window }) = of_block((shape.q_offset() + rows.start) / BLOCK_Q);
        [seen, sink, window.start, window.end].map(|blocks| blocks as u32)
    });
    let rows: Vec<u32> = rows.flatten().collect();
    let sizes = (rows.len() / 4, 4);
    Ok(Tensor::from_vec(rows, sizes, device)?)
}

/// The bounds of [`crate::causal_blocks`], without blocks that are always taken.
pub(crate) fn causal_bounds(shape: &AttnShape, block_k: usize, device: &Device) -> Result<Tensor, BaselineError> {
    query_bounds(shape, device, |query_block| (seen_blocks(query_block, block_k), (0..0).into()))
}

/// Number of key blocks that start before a query block ends.
pub(crate) fn seen_blocks(query_block: usize, block_k: usize) -> usize {
    ((query_block + 1) * BLOCK_Q).div_ceil(block_k)
}

/// From bounds `(.., 4)`, a mask `(.., columns)` of u8: 1 if the column is seen.
pub(crate) fn seen(bounds: &Tensor, columns: usize) -> Result<Tensor, BaselineError> {
    below(bounds, 0, columns)
}

/// From bounds `(.., 4)`, a mask `(.., columns)` of u8: 1 if the column is always taken, seen or not.
pub(crate) fn always_taken(bounds: &Tensor, columns: usize) -> Result<Tensor, BaselineError> {
    let window = below(bounds, 3, columns)?.gt(&below(bounds, 2, columns)?)?;
    Ok(below(bounds, 1, columns)?.maximum(&window)?)
}

/// A mask that is 1 if the column number is below the bound `which`.
fn below(bounds: &Tensor, which: usize, columns: usize) -> Result<Tensor, BaselineError> {
    let bound = bounds.narrow(D::Minus1, which, 1)?.contiguous()?;
    Ok(Tensor::arange(0, columns as u32, bounds.device())?.broadcast_lt(&bound)?)
}

/// The same mask `(query_blocks, key_blocks)` for every head of a call.
pub(crate) fn for_all_heads(mask: &Tensor, shape: &AttnShape) -> Result<Tensor, BaselineError> {
    let (rows, blocks) = mask.dims2()?;
    Ok(mask.broadcast_as((shape.batch(), shape.num_heads(), rows, blocks))?.contiguous()?)
}

/// `(query_blocks, key_blocks)` of u8: 1 in the bands of each query block. Both are numbered by absolute position.
pub(crate) fn bands(
    shape: &AttnShape,
    block_k: usize,
    device: &Device,
    of_block: impl Fn(usize) -> Bands,
) -> Result<Tensor, BaselineError> {
    let bounds = query_bounds(shape, device, |query_block| (0, of_block(query_block)))?;
    always_taken(&bounds, shape.k_len().div_ceil(block_k))
}
