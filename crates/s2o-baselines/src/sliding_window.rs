//! Sliding window and sink: a fixed choice, the baseline for methods that look at the keys.

use candle_core::Tensor;
use candle_s2o::{BLOCK_Q, PrefillCall};

use crate::attention::shape_of;
use crate::bounds::{Bands, bands, for_all_heads};
use crate::error::BaselineError;
use crate::mask::BlockMask;
use crate::selector::{BlockSelector, Selection};

/// The last keys of every query and the first keys of the prompt, in whole blocks of 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    window: usize,
    sink: usize,
}

impl SlidingWindow {
    /// Each query sees at least its last `window` keys, itself included, and the first `sink` keys of the prompt.
    ///
    /// # Errors
    /// [`BaselineError::Option`] for a window of 0.
    pub fn new(window: usize, sink: usize) -> Result<Self, BaselineError> {
        BaselineError::unless(window > 0, "sliding-window", ["window", "at least 1 token"], window)?;
        Ok(Self { window, sink })
    }
}

/// 2048 keys and a sink of 64.
impl Default for SlidingWindow {
    fn default() -> Self {
        Self { window: 2048, sink: 64 }
    }
}

impl BlockSelector for SlidingWindow {
    fn name(&self) -> &str {
        "sliding-window"
    }

    fn select(&self, _: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let window = self.window;
        let sink = self.sink.div_ceil(BLOCK_Q);
        let mask = bands(&shape, BLOCK_Q, q.device(), |query_block| {
            // The block's first query reaches back farthest.
            let oldest = (query_block * BLOCK_Q + 1).saturating_sub(window);
            Bands { sink: sink.min(query_block + 1), window: oldest / BLOCK_Q..query_block + 1 }
        })?;
        Ok(BlockMask::within_diagonal(for_all_heads(&mask, &shape)?, BLOCK_Q).into_keys()?.into())
    }
}
