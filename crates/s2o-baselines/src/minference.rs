//! MInference: every head has one of three patterns.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, KeyColumns, PrefillCall};

use crate::attention::shape_of;
use crate::attention_rows::attention_rows;
use crate::error::BaselineError;
use crate::head_pattern::{HeadPattern, MInferenceConfig};
use crate::mask::BlockMask;
use crate::pooling::{block_scores, block_sums};
use crate::row_choice::top_k;
use crate::selector::{BlockSelector, Selection, TuningCall};
use crate::slash::{LastQueries, blocks_of_distances, vertical_slash_mask};

const NAME: &str = "minference";
/// Number of last queries from which verticals and slashes are estimated.
const LAST_QUERIES: usize = 64;
/// Number of first keys that are always verticals.
const FIRST_KEYS: usize = 30;
/// Distances below this one are always slashes.
const MIN_DISTANCES: usize = 100;
/// Captured masses that differ by less count as equal: such differences are rounding.
const TIE: f32 = 1e-5;
/// Number of queries whose attention the search measures.
const SAMPLED_QUERIES: usize = 64;

/// MInference ("MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
/// arXiv 2407.02490).
///
/// Every head has a [`HeadPattern`], found once. A-shape is fixed. Vertical-slash takes the keys and distances that
/// receive most of the exact attention of the call's last 64 queries. Block-sparse takes, for each query block, the key
/// blocks with the greatest products of means. Every query block attends to its diagonal block.
///
/// The search follows the publication: of candidates of about equal cost ([`HeadPattern::PUBLISHED`] by default), each
/// head takes the candidate that captures most softmax mass. The search runs on a layer's first call with enough keys
/// ([`MInference::search_from`]), over 64 queries spread over the call; the publication searches offline with the
/// output of whole prompts. The result is kept, and can be saved ([`MInference::config`]) and loaded
/// ([`MInference::from_config`]). [`MInference::search`] searches in advance, on several prompts.
///
/// Further deviations: blocks have 128 keys and lie on the grid, so a slash that is not a multiple of 128 touches two
/// blocks per query block; the publication's kernel moves its 64 keys along. Scattered slashes therefore cost more
/// here, and the costs of the candidates differ more.
#[derive(Debug)]
pub struct MInference {
    candidates: Vec<HeadPattern>,
    search_from: usize,
    config: Mutex<MInferenceConfig>,
}

impl Default for MInference {
    fn default() -> Self {
        Self { candidates: HeadPattern::PUBLISHED.to_vec(), search_from: 8192, config: Mutex::default() }
    }
}

impl MInference {
    /// Uses the patterns of a configuration. Layers that it does not name are searched.
    ///
    /// # Errors
    /// [`BaselineError::Option`] for a size of 0.
    pub fn from_config(config: MInferenceConfig) -> Result<Self, BaselineError> {
        config.layers.values().flatten().try_for_each(|pattern| pattern.check().map(drop))?;
        Ok(Self { config: Mutex::new(config), ..Self::default() })
    }

    /// Sets the candidates of the search. Of equally good candidates it takes the first.
    ///
    /// # Errors
    /// [`BaselineError::Option`] for an empty list or a size of 0.
    pub fn candidates(self, candidates: impl IntoIterator<Item = HeadPattern>) -> Result<Self, BaselineError> {
        let candidates = candidates.into_iter().map(HeadPattern::check).collect::<Result<Vec<_>, _>>()?;
        BaselineError::unless(!candidates.is_empty(), NAME, ["candidates", "at least 1"], 0)?;
        Ok(Self { candidates, ..self })
    }

    /// A search on a call with fewer keys (8192 by default) holds for that call only: if every candidate sees nearly
    /// everything, the search says nothing about a head.
    pub fn search_from(self, k_len: usize) -> Self {
        Self { search_from: k_len, ..self }
    }

    /// Searches patterns for the layers of `calls`, several of which may be of one layer: for each head the candidate
    /// that captures most in the mean over the calls. The patterns are returned, not kept.
    ///
    /// # Errors
    /// [`BaselineError::HeadCount`] if calls of a layer differ in their heads, or the error of a refused call.
    pub fn search(&self, calls: &[TuningCall]) -> Result<MInferenceConfig, BaselineError> {
        // By layer, one tensor per call.
        let mut captured: BTreeMap<usize, Vec<Tensor>> = BTreeMap::new();
        for TuningCall { call, q, k, v } in calls {
            let estimate = Estimate::new(q, k, shape_of(q, k, v)?, call.softmax_scale)?;
            let of_layer = captured.entry(call.layer).or_default();
            if let Some(first) = of_layer.first() {
                let got = estimate.shape.num_heads();
                BaselineError::unless_equal_heads(NAME, call.layer, first.dim(0)?, got)?;
            }
            of_layer.push(estimate.captured(&self.candidates)?);
        }
        let found = |(layer, calls): (usize, Vec<Tensor>)| {
            Ok((layer, best_of(&self.candidates, &Tensor::stack(&calls, 0)?.mean(0)?)?))
        };
        Ok(MInferenceConfig { layers: captured.into_iter().map(found).collect::<Result<_, BaselineError>>()? })
    }

    /// The current patterns: those given and those found so far.
    pub fn config(&self) -> MInferenceConfig {
        self.kept().clone()
    }

    fn kept(&self) -> MutexGuard<'_, MInferenceConfig> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn patterns(&self, layer: usize, estimate: &Estimate) -> Result<Vec<HeadPattern>, BaselineError> {
        if let Some(patterns) = self.kept().layers.get(&layer) {
            BaselineError::unless_equal_heads(NAME, layer, estimate.shape.num_heads(), patterns.len())?;
            return Ok(patterns.clone());
        }
        let found = best_of(&self.candidates, &estimate.captured(&self.candidates)?)?;
        if estimate.shape.k_len() >= self.search_from {
            self.kept().layers.insert(layer, found.clone());
        }
        Ok(found)
    }
}

impl BlockSelector for MInference {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let estimate = Estimate::new(q, k, shape_of(q, k, v)?, call.softmax_scale)?;
        let patterns = self.patterns(call.layer, &estimate)?;
        let Choice { blocks, columns } = estimate.choose(&patterns)?;
        let mask = BlockMask::new(&blocks, &estimate.shape, BLOCK_Q)?;
        let Some(keys) = columns else { return Ok(mask.into_keys()?.into()) };
        let at_most = patterns.iter().map(|&pattern| verticals_of(pattern)).max().unwrap_or(0);
        Ok(mask.with_columns(KeyColumns { keys, at_most }).into_keys()?.into())
    }
}

/// Estimates from which the keys of a pattern are chosen.
struct Estimate<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    shape: AttnShape,
    scale: f32,
    last: LastQueries,
    /// `(batch, num_heads, query_blocks, key_blocks)`.
    pooled: Tensor,
}

/// The keys of a pattern for each head.
struct Choice {
    /// `(batch, num_heads, query_blocks, key_blocks)` of u8, undefined beyond the diagonal.
    blocks: Tensor,
    /// `(batch, num_heads, k_len)` of u8.
    columns: Option<Tensor>,
}

impl<'a> Estimate<'a> {
    fn new(q: &'a Tensor, k: &'a Tensor, shape: AttnShape, scale: f32) -> Result<Self, BaselineError> {
        let mut last = LastQueries::of(q, k, &shape, scale, LAST_QUERIES)?;
        // A lift of 2 is above all masses, because a row sums to 1.
        let lift = |mass: &Tensor, first: usize| -> Result<Tensor, BaselineError> {
            let first = first.min(shape.k_len());
            let lift = Tensor::full(2f32, first, q.device())?.pad_with_zeros(0, 0, shape.k_len() - first)?;
            Ok(mass.broadcast_add(&lift)?)
        };
        last.verticals = lift(&last.verticals, FIRST_KEYS)?;
        last.slashes = lift(&last.slashes, MIN_DISTANCES)?;
        let pooled = block_scores(q, k, &shape, scale)?;
        Ok(Self { q, k, shape, scale, last, pooled })
    }

    /// The keys of all heads, with `patterns[h]` in head `h`.
    fn choose(&self, patterns: &[HeadPattern]) -> Result<Choice, BaselineError> {
        let (batch, heads, rows, key_blocks) = self.pooled.dims4()?;
        let device = self.q.device();
        // The same for every sequence of the batch.
        let by_head = |value: &dyn Fn(HeadPattern) -> usize| -> Result<Tensor, BaselineError> {
            let values: Vec<f32> = patterns.iter().map(|&pattern| value(pattern) as f32).collect();
            Ok(Tensor::new(values, device)?.reshape((1, heads, 1))?.broadcast_as((batch, heads, 1))?.contiguous()?)
        };
        let verticals = by_head(&verticals_of)?;
        let slashes = by_head(&|pattern| match pattern {
            HeadPattern::VerticalSlash { slashes, .. } => slashes.max(MIN_DISTANCES),
            _ => 0,
        })?;
        let pooled = by_head(&|pattern| if let HeadPattern::BlockSparse { blocks } = pattern { blocks } else { 0 })?;
        let sink = by_head(&|pattern| if let HeadPattern::AShape { sink, .. } = pattern { sink } else { 0 })?;
        let window = by_head(&|pattern| if let HeadPattern::AShape { window, .. } = pattern { window } else { 1 })?;

        // If fewer keys than that have any attention, the others are equal, and a GPU would choose all of them.
        let columns = (top_k(&self.last.verticals, &verticals)? * self.last.verticals.gt(0f32)?)?;
        let distances = blocks_of_distances(&top_k(&self.last.slashes, &slashes)?)?;
        // The first key of each block and the least distance that it holds; the diagonal block holds distance 0.
        let starts = Tensor::arange(0u32, key_blocks as u32, device)?.to_dtype(DType::F32)?;
        let starts = (starts * BLOCK_Q as f64)?.reshape((1, 1, key_blocks))?;
        let sink = starts.broadcast_lt(&sink)?;
        let nearest = (&starts - (BLOCK_Q - 1) as f64)?.maximum(0.0)?;
        let distances = distances.maximum(&nearest.broadcast_lt(&window)?)?;
        let blocks = vertical_slash_mask(&sink, &distances, &self.shape)?;
        let pooled = pooled.unsqueeze(2)?.broadcast_as((batch, heads, rows, 1))?.contiguous()?;
        let blocks = blocks.maximum(&top_k(&self.pooled, &pooled)?)?;
        let has_columns = patterns.iter().any(|pattern| matches!(pattern, HeadPattern::VerticalSlash { .. }));
        Ok(Choice { blocks, columns: has_columns.then_some(columns) })
    }

    /// Share of the attention of sampled queries that each candidate captures, a mean over the batch: `(heads,
    /// candidates)`.
    fn captured(&self, candidates: &[HeadPattern]) -> Result<Tensor, BaselineError> {
        let (shape, device) = (&self.shape, self.q.device());
        let (heads, q_len) = (shape.num_heads(), shape.q_len());
        let samples = SAMPLED_QUERIES.min(q_len);
        let rows: Vec<u32> = (1..=samples).map(|i| (i * q_len / samples - 1) as u32).collect();
        let offset = shape.q_offset();
        let blocks_of_rows: Vec<u32> =
            rows.iter().map(|&row| ((offset + row as usize) / BLOCK_Q - offset / BLOCK_Q) as u32).collect();
        let blocks_of_rows = Tensor::new(blocks_of_rows, device)?;
        // Keys beyond the diagonal have no attention.
        let mut choices = Vec::with_capacity(candidates.len());
        for &candidate in candidates {
            let Choice { blocks, columns } = self.choose(&vec![candidate; heads])?;
            let blocks = blocks.index_select(&blocks_of_rows, 2)?.flatten_to(1)?.to_dtype(DType::F32)?;
            choices.push((blocks, columns.map(|columns| columns.flatten_to(1)).transpose()?));
        }
        let [captured] = attention_rows([self.q, self.k], shape, self.scale, &rows, |heads, attention| {
            let attended = block_sums(attention)?;
            let mut captured = Vec::with_capacity(choices.len());
            for (blocks, columns) in &choices {
                let blocks = blocks.narrow(0, heads.start, heads.len())?;
                let mut mass = (&attended * &blocks)?;
                if let Some(columns) = columns {
                    let columns = columns.narrow(0, heads.start, heads.len())?.to_dtype(DType::F32)?.unsqueeze(1)?;
                    let single = block_sums(&attention.broadcast_mul(&columns)?)?;
                    mass = (mass + (single * (1.0 - blocks)?)?)?;
                }
                captured.push(mass.sum((1, 2))?);
            }
            Ok([Tensor::stack(&captured, 1)?])
        })?;
        Ok((captured.reshape((shape.batch(), heads, candidates.len()))?.mean(0)? / samples as f64)?)
    }
}

/// Number of single keys that a head with this pattern takes.
fn verticals_of(pattern: HeadPattern) -> usize {
    match pattern {
        HeadPattern::VerticalSlash { verticals, .. } => verticals.max(FIRST_KEYS),
        _ => 0,
    }
}

/// For each head the candidate that captures most; of equally good candidates the first.
fn best_of(candidates: &[HeadPattern], captured: &Tensor) -> Result<Vec<HeadPattern>, BaselineError> {
    let best = captured.to_vec2::<f32>()?.into_iter().map(|captured| {
        let better = |best, i| if captured[i] > captured[best] + TIE { i } else { best };
        candidates[(1..candidates.len()).fold(0, better)]
    });
    Ok(best.collect())
}
