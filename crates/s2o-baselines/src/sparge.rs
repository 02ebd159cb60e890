//! SpargeAttn: pooled attention where pooling can be trusted, everything where it cannot.

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

/// Keys in a key block, where the executor takes such.
const BLOCK_K: usize = 64;

/// SpargeAttn ("SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model Inference",
/// arXiv 2502.18137).
///
/// Query blocks of 128 and key blocks of 64 are stood for by their means. A block is self-similar if the mean cosine
/// between its tokens, each with itself included, is `theta` at least. Over the self-similar key blocks a query block
/// takes the softmax of the products of means, and of it the greatest entries until they hold the share `tau`. Query
/// blocks that are not self-similar take every key block, and key blocks that are not are taken by every query block;
/// so are the first key block and those on the diagonal. For all this the mean key of the call is subtracted from the
/// keys, which changes no softmax, but how alike the keys of a block are.
///
/// Within the blocks taken, values are left out for 32 queries at a time whose scores all lie more than `-lambda` below
/// their running maxima ([`BlockSelection::value_threshold`]).
///
/// Defaults are those of the published function: `tau` 0.98, `theta` 0.6, `lambda` -50. The method is meant to be tuned
/// for each head: [`Sparge::tune`].
///
/// Deviations: the attention is not quantized. The similarity is the mean cosine, as in the published code; the paper
/// divides by the greatest product instead. `lambda` is one for all heads of a layer. On CUDA the executor takes key
/// blocks of 128, of which one is taken if either half is, and leaves out no values.
#[derive(Debug, Clone, PartialEq)]
pub struct Sparge {
    head: SpargeHead,
    lambda: Option<f32>,
    block_k: usize,
    config: SpargeConfig,
}

impl Default for Sparge {
    fn default() -> Self {
        Self {
            head: SpargeHead { tau: 0.98, theta: 0.6 },
            lambda: Some(-50.0),
            block_k: BLOCK_K,
            config: SpargeConfig::default(),
        }
    }
}

impl Sparge {
    /// The settings of a configuration; layers that it does not name have the defaults.
    ///
    /// # Errors
    /// [`BaselineError::Option`] for a value out of its range.
    pub fn from_config(config: SpargeConfig) -> Result<Self, BaselineError> {
        config.check()?;
        Ok(Self { config, ..Self::default() })
    }

    /// The share of pooled attention to take, in layers without a configuration; everything at 1.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside (0, 1].
    pub fn tau(self, tau: f64) -> Result<Self, BaselineError> {
        let head = SpargeHead { tau, ..self.head }.check()?;
        Ok(Self { head, ..self })
    }

    /// The least self-similarity, in layers without a configuration.
    ///
    /// # Errors
    /// [`BaselineError::Option`] outside [-1, 1].
    pub fn theta(self, theta: f64) -> Result<Self, BaselineError> {
        let head = SpargeHead { theta, ..self.head }.check()?;
        Ok(Self { head, ..self })
    }

    /// How far below the maximum values are left out, in nats, in layers without a configuration; `None`: nowhere.
    ///
    /// # Errors
    /// [`BaselineError::Option`] unless negative.
    pub fn lambda(self, lambda: Option<f32>) -> Result<Self, BaselineError> {
        check_lambda(lambda)?;
        Ok(Self { lambda, ..self })
    }

    /// Key blocks of 128 on every device, as the CUDA executor takes them.
    pub fn whole_key_blocks(self) -> Self {
        Self { block_k: BLOCK_Q, ..self }
    }

    /// The configuration by layer and head.
    pub fn config(&self) -> &SpargeConfig {
        &self.config
    }

    fn layer(&self, layer: usize, heads: usize) -> Result<SpargeLayer, BaselineError> {
        match self.config.layers.get(&layer) {
            None => Ok(SpargeLayer { heads: vec![self.head; heads], lambda: self.lambda }),
            Some(settings) if settings.heads.len() == heads => Ok(settings.clone()),
            Some(settings) => {
                Err(BaselineError::HeadCount { method: NAME, layer, expected: heads, got: settings.heads.len() })
            }
        }
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
        let merge_pairs = !on_cpu || self.block_k != BLOCK_K;
        let mask = PooledCall::new(q, k, &shape)?.choose(&heads, call.softmax_scale, merge_pairs)?;
        let mask = BlockMask::within_diagonal(mask, if merge_pairs { BLOCK_Q } else { BLOCK_K });
        if !on_cpu {
            return Ok(mask.into_keys()?.into());
        }
        Ok(BlockSelection { value_threshold: lambda, ..mask.lists()? }.into())
    }
}

/// What a choice is made from, whatever the settings.
struct PooledCall<'a> {
    shape: &'a AttnShape,
    /// Of the means, `(batch, num_heads, query_blocks, key_blocks)`.
    products: Tensor,
    /// Self-similarity of the query blocks, `(batch, num_heads, query_blocks, 1)`.
    query_similarity: Tensor,
    /// And of the key blocks, `(batch, num_heads, 1, key_blocks)`.
    key_similarity: Tensor,
}

impl<'a> PooledCall<'a> {
    fn new(q: &Tensor, k: &Tensor, shape: &'a AttnShape) -> Result<Self, BaselineError> {
        let (queries, query_similarity) = self_similar_blocks(q, shape.q_offset(), BLOCK_Q, None)?;
        let (keys, key_similarity) = self_similar_blocks(k, 0, BLOCK_K, Some(&mean_token(k)?))?;
        let (batch, kv_heads, key_blocks) = key_similarity.dims3()?;
        let group = shape.num_heads() / kv_heads;
        let key_similarity = key_similarity.reshape((batch, kv_heads, 1, key_blocks))?;
        let key_similarity = key_similarity.broadcast_as((batch, kv_heads, group, key_blocks))?.contiguous()?;
        Ok(Self {
            shape,
            products: grouped_products(&queries, &keys)?,
            query_similarity: query_similarity.unsqueeze(3)?,
            key_similarity: key_similarity.reshape((batch, shape.num_heads(), 1, key_blocks))?,
        })
    }

    /// The key blocks that the query blocks take, of those that they see; key blocks of 64, or in pairs.
    fn choose(&self, heads: &[SpargeHead], scale: f32, merge_pairs: bool) -> Result<Tensor, BaselineError> {
        let thetas: Vec<f32> = heads.iter().map(|head| head.theta as f32).collect();
        let thetas = Tensor::new(thetas, self.products.device())?.reshape((1, heads.len(), 1, 1))?;
        let taus: Vec<f64> = (0..self.shape.batch()).flat_map(|_| heads.iter().map(|head| head.tau)).collect();
        let own = BLOCK_Q / BLOCK_K;
        let bounds = query_bounds(self.shape, self.products.device(), |query_block| {
            let always = Bands { sink: 1, window: query_block * own..(query_block + 1) * own };
            (seen_blocks(query_block, BLOCK_K), always)
        })?;
        let choice = RowChoice {
            softmax: Some(scale),
            bounds: Some(&bounds),
            scored: Some(&self.key_similarity.broadcast_ge(&thetas)?),
            select_all: Some(&self.query_similarity.broadcast_lt(&thetas)?),
            merge_pairs,
            ..RowChoice::default()
        };
        choice.choose(&self.products, Select::TopP(&taus))
    }
}
