//! SpargeAttn: pooled attention between self-similar blocks, full attention for the others.

use candle_core::Tensor;
use candle_s2o::{AttnShape, BLOCK_Q, BlockSelection, PrefillCall};

use crate::attention::shape_of;
use crate::bounds::{Bands, query_bounds, seen_blocks};
use crate::error::BaselineError;
use crate::mask::BlockMask;
use crate::pooling::{grouped_products, mean_token, self_similar_blocks};
use crate::row_choice::{RowChoice, Select};
use crate::selector::{BlockSelector, Selection};
use crate::sparge_config::{NAME, SpargeConfig, SpargeHead, SpargeLayer, check_lambda};

/// Keys per key block, if the executor supports this size.
const BLOCK_K: usize = 64;

/// SpargeAttn ("SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model Inference",
/// arXiv 2502.18137).
///
/// Query blocks of 128 and key blocks of 64 are represented by their means. A block is self-similar if the mean cosine
/// between its tokens, each with itself included, is at least `theta`. A query block takes the softmax of the products
/// of means over the self-similar key blocks, and chooses the greatest entries until they hold the share `tau`. Query
/// blocks that are not self-similar take every key block. Every query block also takes the key blocks that are not
/// self-similar, the first key block and those on the diagonal. The mean key of the call is first subtracted from the
/// keys, which changes no softmax, but changes the similarity of the keys of a block.
///
/// In the blocks taken, values are skipped for 32 queries at a time if all their scores lie more than `-lambda` below
/// their running maxima ([`BlockSelection::value_threshold`]).
///
/// The defaults are those of the published function: `tau` 0.98, `theta` 0.6, `lambda` -50. The method is meant to be
/// tuned for each head: [`Sparge::tune`].
///
/// Deviations: the attention is not quantized. The similarity is the mean cosine, as in the published code; the paper
/// divides by the greatest product instead. All heads of a layer share one `lambda`. On CUDA the executor takes key
/// blocks of 128, each of which is taken if either half is, and skips no values.
#[derive(Debug, Clone, PartialEq)]
pub struct Sparge {
    head: SpargeHead,
    lambda: Option<f32>,
    config: SpargeConfig,
}

impl Default for Sparge {
    fn default() -> Self {
        Self { head: SpargeHead { tau: 0.98, theta: 0.6 }, lambda: Some(-50.0), config: SpargeConfig::default() }
    }
}

impl Sparge {
    /// Uses the settings of a configuration. Layers that it does not name have the defaults.
    ///
    /// # Errors
    /// [`BaselineError::Option`] for a value out of its range.
    pub fn from_config(config: SpargeConfig) -> Result<Self, BaselineError> {
        config.check()?;
        Ok(Self { config, ..Self::default() })
    }

    /// The share of pooled attention to take, in layers without a configuration; 1 takes everything.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn tau(self, tau: f64) -> Result<Self, BaselineError> {
        let head = SpargeHead { tau, ..self.head }.check()?;
        Ok(Self { head, ..self })
    }

    /// The least self-similarity of a block, in layers without a configuration.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside [-1, 1].
    pub fn theta(self, theta: f64) -> Result<Self, BaselineError> {
        let head = SpargeHead { theta, ..self.head }.check()?;
        Ok(Self { head, ..self })
    }

    /// Values are skipped if the scores are this far below the maximum (in nats, negative), in layers without a
    /// configuration. `None` skips none.
    ///
    /// # Errors
    /// [`BaselineError::Option`] unless negative.
    pub fn lambda(self, lambda: Option<f32>) -> Result<Self, BaselineError> {
        check_lambda(lambda)?;
        Ok(Self { lambda, ..self })
    }

    /// The configuration by layer and head.
    pub fn config(&self) -> &SpargeConfig {
        &self.config
    }

    fn layer(&self, layer: usize, heads: usize) -> Result<SpargeLayer, BaselineError> {
        let Some(settings) = self.config.layers.get(&layer) else {
            return Ok(SpargeLayer { heads: vec![self.head; heads], lambda: self.lambda });
        };
        BaselineError::unless_equal_heads(NAME, layer, heads, settings.heads.len())?;
        Ok(settings.clone())
    }
}

impl BlockSelector for Sparge {
    fn name(&self) -> &str {
        NAME
    }

    fn select(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let SpargeLayer { heads, lambda } = self.layer(call.layer, shape.num_heads())?;
        let on_cpu = q.device().is_cpu();
        let mask = choose([q, k], &shape, &heads, call.softmax_scale, !on_cpu)?;
        let mask = BlockMask::within_diagonal(mask, if on_cpu { BLOCK_K } else { BLOCK_Q });
        if !on_cpu {
            return Ok(mask.into_keys()?.into());
        }
        Ok(BlockSelection { value_threshold: lambda, ..mask.lists()? }.into())
    }
}

/// The key blocks that the query blocks take, of those that they see, `(batch, num_heads, query_blocks, key_blocks)`:
/// blocks of 64, or of 128 if `merge_pairs`.
fn choose(
    [q, k]: [&Tensor; 2],
    shape: &AttnShape,
    heads: &[SpargeHead],
    scale: f32,
    merge_pairs: bool,
) -> Result<Tensor, BaselineError> {
    let (queries, query_similarity) = self_similar_blocks(q, shape.q_offset(), BLOCK_Q, None)?;
    let (keys, key_similarity) = self_similar_blocks(k, 0, BLOCK_K, Some(&mean_token(k)?))?;
    let (batch, kv_heads, key_blocks) = key_similarity.dims3()?;
    let key_similarity = key_similarity.reshape((batch, kv_heads, 1, key_blocks))?;
    let key_similarity = key_similarity.broadcast_as((batch, kv_heads, heads.len() / kv_heads, key_blocks))?;
    let key_similarity = key_similarity.contiguous()?.reshape((batch, heads.len(), 1, key_blocks))?;
    let thetas: Vec<f32> = heads.iter().map(|head| head.theta as f32).collect();
    let thetas = Tensor::new(thetas, q.device())?.reshape((1, heads.len(), 1, 1))?;
    let taus: Vec<f64> = (0..batch).flat_map(|_| heads.iter().map(|head| head.tau)).collect();
    let own = BLOCK_Q / BLOCK_K;
    let bounds = query_bounds(shape, q.device(), |query_block| {
        let always = Bands { sink: 1, window: query_block * own..(query_block + 1) * own };
        (seen_blocks(query_block, BLOCK_K), always)
    })?;
    let choice = RowChoice {
        softmax: Some(scale),
        bounds: Some(&bounds),
        scored: Some(&key_similarity.broadcast_ge(&thetas)?),
        select_all: Some(&query_similarity.unsqueeze(3)?.broadcast_lt(&thetas)?),
        merge_pairs,
        ..RowChoice::default()
    };
    choice.choose(&grouped_products(&queries, &keys)?, Select::TopP(&taus))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Numbers that look random, the same on every machine, on a slow wave that makes neighbours similar.
    fn numbers(dims: (usize, usize, usize, usize), seed: f64) -> Tensor {
        let (batch, len, heads, head_dim) = dims;
        let number = |i: usize| {
            let noise = ((i as f64 + seed) * 12.9898).sin() * 43758.5453;
            (noise - noise.floor() - 0.5 + (i as f64 / 40_000.0 + seed).sin()) as f32
        };
        let values: Vec<f32> = (0..batch * len * heads * head_dim).map(number).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    }

    #[test]
    fn whole_key_blocks_hold_either_half() {
        let mut left_out = 0;
        for (q_len, k_len, tau) in [(700, 700, 0.5), (300, 900, 0.7), (129, 1100, 0.9)] {
            let (q, k) = (numbers((2, q_len, 4, 16), 0.25), numbers((2, k_len, 2, 16), 0.5));
            let shape = shape_of(&q, &k, &k).unwrap();
            let heads = [SpargeHead { tau, theta: -1.0 }; 4];
            let [halves, wholes] = [(false, BLOCK_K), (true, BLOCK_Q)].map(|(merge_pairs, block_k)| {
                let mask = choose([&q, &k], &shape, &heads, 0.25, merge_pairs).unwrap();
                BlockMask::within_diagonal(mask, block_k).lists().unwrap().blocks
            });
            assert_eq!((halves.block_k(), wholes.block_k(), halves.len()), (64, 128, wholes.len()));
            for list in 0..wholes.len() {
                let mut expected: Vec<i32> = halves.list(list).iter().map(|block| block / 2).collect();
                expected.dedup();
                assert_eq!(wholes.list(list), expected);
            }
            // Each list begins with its last block.
            left_out += (0..wholes.len())
                .map(|list| wholes.list(list)[0] as usize + 1 - wholes.list(list).len())
                .sum::<usize>();
        }
        assert!(left_out > 0, "nothing was chosen");
    }
}
