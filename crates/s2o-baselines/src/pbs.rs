//! PBS-Attn: keys permuted inside segments, so that important keys share blocks.

use std::ops::Range;

use candle_core::Tensor;
use candle_s2o::{AttnShape, BLOCK_Q, PrefillCall};

use crate::antidiagonal::{Antidiagonals, STRIDE};
use crate::attention::shape_of;
use crate::bounds::{bands, for_all_heads, query_bounds};
use crate::error::{BaselineError, checked_threshold};
use crate::key_order::{attention_of_last_block, descending, first_key_block, reorder};
use crate::mask::BlockMask;
use crate::pooling::block_products;
use crate::row_choice::{RowChoice, Select};
use crate::selector::{BlockSelector, Reordered, Selection};

const NAME: &str = "pbs";

/// The score of the blocks of reordered keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PbsScore {
    /// Means of queries and keys, as published.
    #[default]
    MeanPooled,
    /// Antidiagonals of stride 16, as in [`crate::XAttention`].
    Antidiagonal,
}

/// PBS-Attn, permuted block-sparse attention ("Sparser Block-Sparse Attention via Token Permutation", arXiv
/// 2510.21270).
///
/// The keys of each segment, with their values, are reordered by descending s, the mean of softmax(scale * <query,
/// key>) over the last 128 queries of the call. The reordered keys of all segments before the query block's own form
/// blocks of 128, with P = softmax(scale * <mean query, mean key>) over them. The query block takes these blocks in
/// descending P until their sum reaches the threshold. The block that holds the first key and the query block's own
/// segment are always taken, and do not count. Queries keep their order.
///
/// As published, the keys that an early query sees depend on later queries; it never sees a later key.
///
/// Differences from the published code: s is a causal softmax over all keys, not an unmasked softmax over the keys of
/// whole segments. A query's own segment keeps its order, which changes no output and saves the blocks beyond the
/// diagonal. A ragged last query block is the mean of the tokens present. KV heads are not repeated for scoring, and
/// chunks of a prompt (fewer queries than keys) are supported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pbs {
    segment: usize,
    threshold: f64,
    score: PbsScore,
    shared_order: bool,
}

impl Pbs {
    /// Keys per segment.
    ///
    /// # Errors
    /// [`BaselineError::Option`] unless it is a multiple of 128 up to 8192, the most that Candle sorts on a GPU.
    pub fn segment(self, segment: usize) -> Result<Self, BaselineError> {
        let fits = segment > 0 && segment.is_multiple_of(BLOCK_Q) && segment <= 8192;
        BaselineError::unless(fits, NAME, ["segment", "a multiple of 128 up to 8192"], segment)?;
        Ok(Self { segment, ..self })
    }

    /// The share of P that the chosen blocks reach; 1 is dense attention.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn threshold(self, threshold: f64) -> Result<Self, BaselineError> {
        Ok(Self { threshold: checked_threshold(NAME, threshold)?, ..self })
    }

    /// The score of the blocks.
    pub fn score(self, score: PbsScore) -> Self {
        Self { score, ..self }
    }

    /// Uses one order for all query heads of a KV head, by the mean of their s, so that keys and values are copied only
    /// once per KV head. The publication has an order for each query head.
    pub fn shared_order(self, shared_order: bool) -> Self {
        Self { shared_order, ..self }
    }

    /// The order of the keys before the last segment of a call, as positions: `(batch, heads, keys)` of u32, for each
    /// query head or, if shared, each KV head. The block numbers of a selection count along it, then along the call's
    /// keys.
    ///
    /// # Errors
    /// If the tensors do not fit each other, or Candle fails.
    pub fn key_order(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, BaselineError> {
        self.order(call, q, k, &shape_of(q, k, v)?)
    }

    fn order(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, shape: &AttnShape) -> Result<Tensor, BaselineError> {
        let mut attention = attention_of_last_block(q, k, shape, call.softmax_scale)?;
        if self.shared_order {
            let group = shape.num_heads() / shape.num_kv_heads();
            attention = attention.reshape((shape.batch(), shape.num_kv_heads(), group, shape.k_len()))?.mean(2)?;
        }
        descending(&attention, self.segment)
    }

    /// The reordered blocks that each query block takes: `(batch, num_heads, query_blocks, blocks)`.
    fn reordered_blocks(
        &self,
        call: &PrefillCall,
        q: &Tensor,
        shape: &AttnShape,
        order: &Tensor,
        reordered: &Reordered,
    ) -> Result<Tensor, BaselineError> {
        let (before, segment) = (order.dim(2)?, self.segment);
        let k = reordered.k.narrow(1, 0, before)?;
        let earlier = |query_block| (own_segment(query_block, segment).start, (0..0).into());
        let earlier = query_bounds(shape, q.device(), earlier)?;
        let (scale, offset) = (call.softmax_scale, shape.q_offset());
        let scores = match self.score {
            PbsScore::MeanPooled => block_products(q, &k, offset)?,
            PbsScore::Antidiagonal => {
                let antidiagonals = Antidiagonals { stride: STRIDE, scale, offset };
                antidiagonals.scores(q, &k, |stride| stride * STRIDE / segment * segment / STRIDE)?
            }
        };
        let first = first_key_block(order)?;
        let (batch, heads, _, blocks) = first.dims4()?;
        let group = shape.num_heads() / heads;
        let first = first.broadcast_as((batch, heads, group, blocks))?.contiguous()?;
        let first = first.reshape((batch, shape.num_heads(), 1, blocks))?;
        let choice = RowChoice {
            softmax: matches!(self.score, PbsScore::MeanPooled).then_some(scale),
            bounds: Some(&earlier),
            forced: Some(&first),
            ..RowChoice::default()
        };
        choice.choose(&scores, Select::TopP(&[self.threshold]))
    }
}

/// The key blocks of a query block's segment, up to its own.
fn own_segment(query_block: usize, segment: usize) -> Range<usize> {
    let blocks = segment / BLOCK_Q;
    let first = query_block / blocks * blocks;
    first..query_block + 1
}

/// Segments of 256, threshold 0.9, mean-pooled scores, an order for each query head.
impl Default for Pbs {
    fn default() -> Self {
        Self { segment: 256, threshold: 0.9, score: PbsScore::MeanPooled, shared_order: false }
    }
}

impl BlockSelector for Pbs {
    fn name(&self) -> &str {
        match self.score {
            PbsScore::MeanPooled => NAME,
            PbsScore::Antidiagonal => "pbs-antidiagonal",
        }
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let own = bands(&shape, BLOCK_Q, q.device(), |query_block| own_segment(query_block, self.segment).into())?;
        let own = for_all_heads(&own, &shape)?;
        if shape.k_len() <= self.segment {
            return Ok(BlockMask::within_diagonal(own, BLOCK_Q).into_keys()?.into());
        }
        let order = self.order(call, q, k, &shape)?;
        let reordered = reorder(k, v, &order)?;
        let earlier = self.reordered_blocks(call, q, &shape, &order, &reordered)?;
        let mask = BlockMask::within_diagonal(Tensor::cat(&[&earlier, &own], 3)?, BLOCK_Q);
        Ok(Selection { keys: mask.into_keys()?, reordered: Some(reordered) })
    }
}
