//! Attention to the key blocks that a method has selected, on every backend.

use candle_core::Tensor;
use s2o::BlockSelection;
use s2o::cpu::{self, Element, Inputs};
use std::sync::Arc;

use crate::error::AttnError;
use crate::op::{Kernel, apply};

/// Attention of each query block to what `selection` names: shapes and dtypes as in
/// [`dense_attn`](crate::dense_attn). This is the executor for block-sparse methods, which only select. Queries that
/// see nothing get zeros. On a GPU key blocks are of 128 keys, and there are neither columns nor a value threshold.
///
/// Returns the output and, by head (`b * num_heads + h`), the tiles whose values were left out by
/// [`BlockSelection::value_threshold`].
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`s2o::BlockError`] if the selection does not fit them.
pub fn block_sparse_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
    selection: impl Into<Arc<BlockSelection>>,
) -> Result<(Tensor, Vec<f64>), AttnError> {
    apply(BlockOp { softmax_scale, causal, selection: selection.into() }, q, k, v)
}

#[derive(Debug)]
struct BlockOp {
    softmax_scale: f32,
    causal: bool,
    selection: Arc<BlockSelection>,
}

impl Kernel for BlockOp {
    const NAME: &'static str = "block-sparse-attention";
    type Report = Vec<f64>;

    fn softmax_scale(&self) -> f32 {
        self.softmax_scale
    }

    fn cpu<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Vec<f64>, AttnError> {
        Ok(cpu::block_sparse(inputs, self.causal, &self.selection, out)?)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, call: &crate::cuda::Call) -> Result<Vec<f64>, AttnError> {
        self.selection.check(call.shape(), self.causal).map_err(s2o::S2oError::from)?;
        crate::cuda::block_sparse(call, self.causal, &self.selection)?;
        Ok(vec![0.0; call.shape().batch() * call.shape().num_heads()])
    }
}
