//! Delta Attention: exact attention of every n-th query corrects the sparse attention of the queries after it.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, HeadWork, Mask, PrefillCall, dense_attn};

use crate::error::BaselineError;

/// The correction of [`BlockSparse::with_delta`](crate::BlockSparse::with_delta).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delta {
    stride: usize,
}

impl Delta {
    pub(crate) fn new(stride: usize) -> std::result::Result<Self, BaselineError> {
        BaselineError::unless(stride > 0, "delta", ["stride", "at least 1 query"], stride)?;
        Ok(Self { stride })
    }

    /// The runs of rows of a call that share a difference. Exact rows follow the last run.
    fn runs(self, shape: &AttnShape, prompt_len: usize) -> Vec<Range<usize>> {
        let Self { stride } = self;
        let exact = stride.max(BLOCK_Q) + prompt_len % stride;
        let (first, end) = (shape.q_offset(), shape.k_len().min(prompt_len.saturating_sub(exact)));
        let runs = if first < end { first / stride..end.div_ceil(stride) } else { 0..0 };
        let rows = |run: usize| (run * stride).max(first) - first..((run + 1) * stride).min(end) - first;
        runs.map(rows).collect()
    }

    /// The corrected output of a call whose sparse output is `sparse`. Adds the exact rows to the work of each head: a
    /// score counts as much as in a tile.
    pub(crate) fn correct(
        self,
        call: &PrefillCall,
        shape: &AttnShape,
        [q, k, v]: [&Tensor; 3],
        sparse: &Tensor,
        work: &mut [HeadWork],
    ) -> Result<Tensor> {
        let runs = self.runs(shape, call.prompt_len);
        let corrected = runs.last().map_or(0, |run| run.end);
        let (mut outputs, mut scores) = (Vec::new(), 0);
        if !runs.is_empty() {
            let rows: Vec<u32> = runs.iter().map(|run| run.start as u32).collect();
            scores += rows.iter().map(|&row| shape.q_offset() + row as usize + 1).sum::<usize>();
            let rows = Tensor::new(rows, q.device())?;
            let exact = self.exact(call, shape, [&q.index_select(&rows, 1)?, k, v], &runs)?;
            let differences = (exact - sparse.index_select(&rows, 1)?)?;
            // Only the first and the last run may be shorter.
            let mut first = 0;
            for runs in runs.chunk_by(|a, b| a.len() == b.len()) {
                let (batch, _, heads, head_dim) = sparse.dims4()?;
                let rows = sparse.narrow(1, runs[0].start, runs.len() * runs[0].len())?;
                let rows = rows.reshape((batch, runs.len(), runs[0].len(), heads, head_dim))?;
                let rows = rows.broadcast_add(&differences.narrow(1, first, runs.len())?.unsqueeze(2)?)?;
                outputs.push(rows.flatten(1, 2)?);
                first += runs.len();
            }
        }
        if corrected < shape.q_len() {
            let rest = q.narrow(1, corrected, shape.q_len() - corrected)?;
            scores += (shape.q_offset() + corrected + 1..=shape.k_len()).sum::<usize>();
            outputs.push(dense_attn(&rest, k, v, call.softmax_scale, Mask::Causal)?);
        }
        work.iter_mut().for_each(|head| head.visited += scores as f64 / (BLOCK_Q * BLOCK_Q) as f64);
        if let [output] = &outputs[..] { Ok(output.clone()) } else { Tensor::cat(&outputs, 1) }
    }

    /// Exact attention of the first query of each run, which are the rows of `q`.
    fn exact(
        self,
        call: &PrefillCall,
        shape: &AttnShape,
        [q, k, v]: [&Tensor; 3],
        runs: &[Range<usize>],
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if crate::cuda::supports_heads(q) {
            let positions = runs.iter().map(|run| shape.q_offset() + run.start).collect::<Vec<_>>();
            let exact = crate::cuda::exact_rows(q, k, v, call.softmax_scale, self.stride, &positions);
            return exact.map_err(|error| BaselineError::from(error).into());
        }
        let row = |(i, run): (usize, &Range<usize>)| {
            let keys = shape.q_offset() + run.start + 1;
            let [k, v] = [k.narrow(1, 0, keys)?, v.narrow(1, 0, keys)?];
            Ok(dense_attn(&q.narrow(1, i, 1)?, &k, &v, call.softmax_scale, Mask::Full)?)
        };
        Tensor::cat(&runs.iter().enumerate().map(row).collect::<Result<Vec<_>>>()?, 1)
    }
}
