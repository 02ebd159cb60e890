//! The ops and their public functions. The backends implement the computation.

mod block;
mod s2o;

use candle_core::Tensor;
use s2o_core::{Mask, ScoreScale};

pub use block::{KeyColumns, block_mask_attn, block_sparse_attn};
pub use s2o::{S2oOp, s2o_attn, s2o_attn_with_stats};

pub(crate) use block::{BlockOp, MaskOp};
pub(crate) use s2o::RankOp;

use crate::attn_op::{AttnOp, apply};
use crate::error::AttnError;

/// Exact attention with the engine, shapes and dtypes of [`s2o_attn`](crate::s2o_attn). Under [`Mask::Causal`] the
/// queries are the last `q_len` positions. Gradients are not supported.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, mask: Mask) -> Result<Tensor, AttnError> {
    Ok(apply(&DenseOp { mask, splits: None }, softmax_scale, [q, k, v])?.0)
}

/// [`dense_attn`] with capped scores: the exact counterpart of [`S2oOp::with_softcap`].
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn_with_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    softcap: f32,
    mask: Mask,
) -> Result<Tensor, AttnError> {
    let scale = ScoreScale { softmax_scale, softcap: Some(softcap) };
    Ok(apply(&DenseOp { mask, splits: None }, scale, [q, k, v])?.0)
}

/// Dense attention with the engine that S2O uses for its windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseOp {
    pub(crate) mask: Mask,
    /// Number of parts of the keys that a GPU computes separately and then joins. `None`: enough parts to fill the GPU.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU computes all keys at once"))]
    pub(crate) splits: Option<usize>,
}

impl AttnOp for DenseOp {
    const NAME: &'static str = "s2o-dense-attention";
    type Report = ();
}
