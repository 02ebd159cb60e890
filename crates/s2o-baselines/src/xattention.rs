//! XAttention: blocks scored by their antidiagonals.

use candle_core::Tensor;
use candle_s2o::{BLOCK_Q, PrefillCall};

use crate::antidiagonal::{STRIDE, antidiagonal_scores, checked_stride};
use crate::attention::shape_of;
use crate::bounds::{first_and_own, query_bounds, seen_blocks};
use crate::error::{BaselineError, checked_threshold};
use crate::mask::BlockMask;
use crate::row_choice::{RowChoice, Select};
use crate::selector::{BlockSelector, Selection};

const NAME: &str = "xattention";

/// XAttention ("XAttention: Block Sparse Attention with Antidiagonal Scoring", arXiv 2503.16428): takes key blocks of
/// 128 in descending [`antidiagonal_scores`] until their sum reaches the threshold's share of the row. As in the
/// published code, the first block and the diagonal block are always taken, and their scores count first.
///
/// Not implemented: thresholds by head, which the paper finds for one model with a search, and the published code's
/// other orders of the queries in a stride.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XAttention {
    stride: usize,
    threshold: f64,
}

impl XAttention {
    /// Sums every `stride`-th antidiagonal. A greater stride costs less.
    ///
    /// # Errors
    /// [`BaselineError::Option`] unless it divides 128.
    pub fn stride(self, stride: usize) -> Result<Self, BaselineError> {
        Ok(Self { stride: checked_stride(NAME, stride)?, ..self })
    }

    /// The share of the scores that the chosen blocks reach; 1 is dense attention.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn threshold(self, threshold: f64) -> Result<Self, BaselineError> {
        Ok(Self { threshold: checked_threshold(NAME, threshold)?, ..self })
    }
}

/// Stride 16, threshold 0.9.
impl Default for XAttention {
    fn default() -> Self {
        Self { stride: STRIDE, threshold: 0.9 }
    }
}

impl BlockSelector for XAttention {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let scores = antidiagonal_scores(q, k, self.stride, call.softmax_scale)?;
        let bounds = query_bounds(&shape, q.device(), |block| (seen_blocks(block, BLOCK_Q), first_and_own(block)))?;
        let choice = RowChoice { bounds: Some(&bounds), forced_count_first: true, ..RowChoice::default() };
        let mask = choice.choose(&scores, Select::TopP(&[self.threshold]))?;
        Ok(BlockMask::within_diagonal(mask, BLOCK_Q).into_keys()?.into())
    }
}
