//! Attention to the key blocks that a method selected, on every backend.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use s2o_core::{AttnShape, BLOCK_Q, BlockError, BlockSelection, Mask, S2oError, query_blocks};

use crate::attn_op::{AttnOp, apply};
use crate::error::AttnError;

/// Attention of each query block to the keys in `selection`, with the shapes and dtypes of
/// [`dense_attn`](crate::dense_attn). Block-sparse methods only select; this function computes. Queries without a key
/// get zeros. A GPU supports only key blocks of 128 keys, without columns or a value threshold.
///
/// Returns the output and, for each head (`b * num_heads + h`), the number of tiles whose values
/// [`BlockSelection::value_threshold`] skipped.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`s2o_core::BlockError`] if the selection does not fit them.
pub fn block_sparse_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: Mask,
    selection: impl Into<Arc<BlockSelection>>,
) -> Result<(Tensor, Vec<f64>), AttnError> {
    apply(&BlockOp { mask, selection: selection.into() }, softmax_scale, [q, k, v])
}

/// Single keys that every query block of a head sees in addition to its blocks, like [`BlockSelection::columns`].
#[derive(Debug, Clone)]
pub struct KeyColumns {
    /// U8 tensor `(batch, num_heads, k_len)` on the device of `q`. Nonzero entries choose keys.
    pub keys: Tensor,
    /// Upper bound on the keys of a head, rounded up to a multiple of 128 (`usize::MAX`: all keys). Excess keys, at the
    /// highest positions, are dropped. A GPU needs 4 bytes for each of these keys and each query block of every head.
    pub at_most: usize,
}

impl KeyColumns {
    /// Maximum number of keys per head for `k_len` keys, a multiple of 128.
    pub fn capacity(&self, k_len: usize) -> usize {
        self.at_most.clamp(1, k_len.max(1)).next_multiple_of(BLOCK_Q)
    }

    /// Chosen keys of each head (`b * num_heads + h`) in ascending order, read back from the device.
    ///
    /// # Errors
    /// If `keys` is not a mask of three dimensions, or Candle fails.
    pub fn lists(&self) -> candle_core::Result<Vec<Vec<u32>>> {
        let (_, _, k_len) = self.keys.dims3()?;
        let chosen = self.keys.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u8>()?;
        let of_head = |row: &[u8]| {
            let keys = (0..k_len as u32).filter(|&key| row[key as usize] != 0);
            keys.take(self.capacity(k_len)).collect()
        };
        Ok(chosen.chunks_exact(k_len.max(1)).map(of_head).collect())
    }
}

/// [`block_sparse_attn`] to the blocks of a tensor. `blocks` is a U8 tensor `(batch, num_heads, query_blocks,
/// key_blocks)` on the device of `q`: if an entry is nonzero, a query block of [`query_blocks`] attends to a block of
/// 128 keys. If `mask` is causal, blocks beyond the diagonal are ignored. `columns` adds single keys and requires a
/// causal `mask`. On a GPU a kernel converts the masks to lists, and the host does not wait.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`s2o_core::BlockError::Mask`] or [`s2o_core::BlockError::ColumnMask`]
/// if a mask does not fit them, [`s2o_core::BlockError::ColumnsNotCausal`].
pub fn block_mask_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: Mask,
    blocks: &Tensor,
    columns: Option<&KeyColumns>,
) -> Result<Tensor, AttnError> {
    let of_bytes = |name, flags: &Tensor| {
        if flags.dtype() != DType::U8 {
            return Err(AttnError::MaskDType { name, got: flags.dtype() });
        }
        if !flags.device().same_device(q.device()) {
            let [expected, got] = [q, flags].map(|tensor| tensor.device().location());
            return Err(AttnError::DeviceMismatch { name, expected, got });
        }
        Ok(flags.contiguous()?)
    };
    let blocks = of_bytes("mask", blocks)?;
    let columns = columns.map(|columns| {
        let keys = of_bytes("columns", &columns.keys)?;
        Ok::<_, AttnError>(KeyColumns { keys, ..*columns })
    });
    let op = MaskOp { mask, blocks, columns: columns.transpose()? };
    Ok(apply(&op, softmax_scale, [q, k, v])?.0)
}

#[derive(Debug)]
pub(crate) struct BlockOp {
    pub(crate) mask: Mask,
    pub(crate) selection: Arc<BlockSelection>,
}

impl AttnOp for BlockOp {
    const NAME: &'static str = "block-sparse-attention";
    type Report = Vec<f64>;
}

#[derive(Debug)]
pub(crate) struct MaskOp {
    pub(crate) mask: Mask,
    /// Contiguous u8.
    pub(crate) blocks: Tensor,
    /// Its `keys` are contiguous u8.
    pub(crate) columns: Option<KeyColumns>,
}

impl MaskOp {
    /// Checks the dimensions of the masks.
    pub(crate) fn check(&self, shape: &AttnShape) -> Result<(), AttnError> {
        let query_blocks = query_blocks(shape, self.mask).len();
        let expected = [shape.batch(), shape.num_heads(), query_blocks, shape.k_len().div_ceil(BLOCK_Q)];
        if self.blocks.dims() != expected {
            let got = self.blocks.dims().to_vec();
            return Err(S2oError::from(BlockError::Mask { expected, got }).into());
        }
        let Some(columns) = &self.columns else { return Ok(()) };
        if !self.mask.is_causal() {
            return Err(S2oError::from(BlockError::ColumnsNotCausal).into());
        }
        let expected = [shape.batch(), shape.num_heads(), shape.k_len()];
        if columns.keys.dims() != expected {
            let got = columns.keys.dims().to_vec();
            return Err(S2oError::from(BlockError::ColumnMask { expected, got }).into());
        }
        Ok(())
    }
}

impl AttnOp for MaskOp {
    const NAME: &'static str = "block-mask-attention";
    type Report = ();
}
