//! Mean pooling: the simplest selector that uses queries and keys.

use candle_core::Tensor;
use candle_s2o::{BLOCK_Q, PrefillCall};

use crate::attention::shape_of;
use crate::bounds::{first_and_own, query_bounds, seen_blocks};
use crate::error::{BaselineError, checked_threshold};
use crate::mask::BlockMask;
use crate::pooling::block_products;
use crate::row_choice::{RowChoice, Select};
use crate::selector::{BlockSelector, Selection};

const NAME: &str = "mean-pooling";

/// Scores blocks of 128 by their means: P = softmax(scale * <mean query, mean key>) over the causal key blocks. Each
/// query block takes the key blocks in descending P until their sum reaches the threshold, and always the first block
/// and the diagonal block in addition.
///
/// PBS-Attn ("Sparser Block-Sparse Attention via Token Permutation", arXiv 2510.21270) and others start from this
/// selection, and the evaluation of PBS-Attn has it as a baseline. The published code fills a ragged last block with
/// zeros, so its mean is shorter; here it is the mean of the tokens present.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeanPooling {
    threshold: f64,
}

impl MeanPooling {
    /// The share of P that the chosen blocks reach; 1 is dense attention.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn threshold(self, threshold: f64) -> Result<Self, BaselineError> {
        Ok(Self { threshold: checked_threshold(NAME, threshold)? })
    }
}

/// Threshold 0.9.
impl Default for MeanPooling {
    fn default() -> Self {
        Self { threshold: 0.9 }
    }
}

impl BlockSelector for MeanPooling {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let bounds = query_bounds(&shape, q.device(), |block| (seen_blocks(block, BLOCK_Q), first_and_own(block)))?;
        let choice = RowChoice { softmax: Some(call.softmax_scale), bounds: Some(&bounds), ..RowChoice::default() };
        let mask = choice.choose(&block_products(q, k, shape.q_offset())?, Select::TopP(&[self.threshold]))?;
        Ok(BlockMask::within_diagonal(mask, BLOCK_Q).into_keys()?.into())
    }
}
