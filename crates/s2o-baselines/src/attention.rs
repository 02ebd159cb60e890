//! [`BlockSparse`]: an [`Attention`] made of a selector, which counts its work.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use candle_s2o::{
    Attention, AttnShape, ChunkLedger, HeadWork, Mask, PrefillCall, block_mask_attn, block_sparse_attn, dense_attn,
};

use crate::delta::Delta;
use crate::error::BaselineError;
use crate::mask::Keys;
use crate::selector::{BlockSelector, Selection};

/// Attention to the key blocks that a selector picks.
#[derive(Debug)]
pub struct BlockSparse<S> {
    selector: S,
    dense_below: usize,
    delta: Option<Delta>,
    /// One entry per head.
    work: ChunkLedger<Vec<HeadWork>>,
}

impl<S: BlockSelector> BlockSparse<S> {
    /// Selects blocks for prompts of every length.
    pub fn new(selector: S) -> Self {
        Self { selector, dense_below: 0, delta: None, work: ChunkLedger::default() }
    }

    /// Uses dense attention for prompts shorter than `tokens`.
    pub fn dense_below(mut self, tokens: usize) -> Self {
        self.dense_below = tokens;
        self
    }

    /// Corrects the output by exact attention of every `stride`-th query: Delta Attention ("Delta Attention: Fast and
    /// Accurate Sparse Attention Inference by Delta Correction", arXiv 2505.11254). The difference between exact and
    /// sparse output of such a query is added to its own output and to those of the queries up to the next one. As
    /// published, the last `max(128, stride) + prompt_len % stride` queries of the prompt are exact. A chunk that does
    /// not begin at a multiple of `stride` begins with an exact query. Published: `stride` 64 on [`SlidingWindow`].
    ///
    /// [`SlidingWindow`]: crate::SlidingWindow
    ///
    /// # Errors
    /// [`BaselineError::Option`] for a stride of 0.
    pub fn with_delta(mut self, stride: usize) -> std::result::Result<Self, BaselineError> {
        self.delta = Some(Delta::new(stride)?);
        Ok(self)
    }

    /// The selector.
    pub fn selector(&self) -> &S {
        &self.selector
    }

    /// Runs only the executor on `selection`, which [`BlockSelector::select`] made for this call. Returns the output
    /// and the tiles computed by head (`b * num_heads + h`).
    ///
    /// # Errors
    /// If the selection does not fit the call.
    pub fn attend(
        call: &PrefillCall,
        [q, k, v]: [&Tensor; 3],
        selection: Selection,
    ) -> std::result::Result<(Tensor, Vec<HeadWork>), BaselineError> {
        let shape = shape_of(q, k, v)?;
        let (k, v) = selection.reordered.as_ref().map_or((k, v), |reordered| (&reordered.k, &reordered.v));
        match selection.keys {
            Keys::Lists(lists) => {
                let work = lists.work(&shape);
                let (out, _) = block_sparse_attn(q, k, v, call.softmax_scale, Mask::Causal, lists)?;
                Ok((out, work))
            }
            Keys::Mask(mask) => {
                let out = block_mask_attn(q, k, v, call.softmax_scale, Mask::Causal, mask.tensor(), mask.columns())?;
                Ok((out, mask.work(&shape)?))
            }
        }
    }

    /// [`BlockSparse::attend`], and the correction by exact queries if there is one.
    ///
    /// # Errors
    /// If the selection does not fit the call.
    pub fn attend_and_correct(
        &self,
        call: &PrefillCall,
        [q, k, v]: [&Tensor; 3],
        selection: Selection,
    ) -> std::result::Result<(Tensor, Vec<HeadWork>), BaselineError> {
        let (out, mut work) = Self::attend(call, [q, k, v], selection)?;
        let Some(delta) = self.delta else { return Ok((out, work)) };
        let out = delta.correct(call, &shape_of(q, k, v)?, [q, k, v], &out, &mut work)?;
        Ok((out, work))
    }

    /// Takes the work of the last prompt by layer and head (`b * num_heads + h`). Consecutive chunks are added up; a
    /// call that does not continue where the previous call ended starts a new count.
    pub fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        self.work.take()
    }

    fn record(&self, layer: usize, shape: &AttnShape, work: Vec<HeadWork>) {
        self.work.record(layer, shape.q_offset()..shape.k_len(), |heads| {
            if heads.len() != work.len() {
                *heads = vec![HeadWork::default(); work.len()];
            }
            for (head, more) in heads.iter_mut().zip(work) {
                head.visited += more.visited;
                head.causal += more.causal;
            }
        });
    }
}

impl<S: BlockSelector> Attention for BlockSparse<S> {
    fn name(&self) -> &str {
        self.selector.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let shape = shape_of(q, k, v)?;
        let (out, work) = if call.prompt_len < self.dense_below {
            (dense_attn(q, k, v, call.softmax_scale, Mask::Causal)?, HeadWork::dense(&shape))
        } else {
            let selection = self.selector.select(call, q, k, v)?;
            self.attend_and_correct(call, [q, k, v], selection)?
        };
        self.record(call.layer, &shape, work);
        Ok(out)
    }
}

/// The sizes of a call, checked.
pub(crate) fn shape_of(q: &Tensor, k: &Tensor, v: &Tensor) -> std::result::Result<AttnShape, BaselineError> {
    let dims = |tensor: &Tensor| tensor.dims4().map(|(b, s, h, d)| [b, s, h, d]);
    Ok(AttnShape::of(dims(q)?, dims(k)?, dims(v)?)?)
}
