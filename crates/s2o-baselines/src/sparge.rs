//! SpargeAttn: pooled attention where pooling can be trusted, everything where it cannot.

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, BlockSelection, PrefillCall};

use crate::attention::shape_of;
use crate::error::BaselineError;
use crate::mask::{Bands, BlockMask, bands, causal_blocks};
use crate::pooling::{by_blocks, grouped_products, masked_softmax};
use crate::selector::{BlockSelector, Selection};
use crate::sparge_config::{SpargeConfig, SpargeHead, SpargeLayer, check_lambda};
use crate::top_cdf::top_cdf_by_group;

pub(crate) const NAME: &str = "spargeattn";

/// Keys in a key block, where the executor takes such.
const BLOCK_K: usize = 64;

/// SpargeAttn ("SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model Inference",
/// arXiv 2502.18137).
///
/// Query blocks of 128 and key blocks of 64 are stood for by their means. A block is self-similar if the mean cosine
/// between its tokens, each with itself included, is `theta` at least. Over the self-similar key blocks a query block
/// takes the softmax of the products of means, and of it the greatest entries until they hold the share `tau`. Query
/// blocks that are not self-similar take every key block, and key blocks that are not are taken by every query block; so
/// are the first key block and those on the diagonal. For all this the mean key of the call is subtracted from the keys,
/// which changes no softmax, but how alike the keys of a block are.
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
        let mask = PooledCall::new(q, k, &shape, call.softmax_scale)?.choose(&heads)?;
        let mask = BlockMask::new(&mask, &shape, BLOCK_K)?;
        let mask = match on_cpu && self.block_k == BLOCK_K {
            true => mask,
            false => BlockMask::new(&either_half(mask.tensor())?, &shape, BLOCK_Q)?,
        };
        if !on_cpu {
            return Ok(mask.into_keys()?.into());
        }
        Ok(BlockSelection { value_threshold: lambda, ..mask.lists()? }.into())
    }
}

/// From `(.., blocks)` to `(.., blocks / 2)`, rounded up.
fn either_half(mask: &Tensor) -> Result<Tensor, BaselineError> {
    let (batch, heads, rows, blocks) = mask.dims4()?;
    let pairs = mask.pad_with_zeros(D::Minus1, 0, blocks % 2)?.reshape((batch, heads, rows, blocks.div_ceil(2), 2))?;
    Ok(pairs.narrow(4, 0, 1)?.maximum(&pairs.narrow(4, 1, 1)?)?.squeeze(4)?)
}

/// What a choice is made from, whatever the settings.
struct PooledCall<'a> {
    shape: &'a AttnShape,
    /// `(batch, num_heads, query_blocks, key_blocks)`, scaled.
    scores: Tensor,
    /// Self-similarity of the query blocks, `(batch, num_heads, query_blocks, 1)`.
    queries_alike: Tensor,
    /// And of the key blocks, `(batch, num_heads, 1, key_blocks)`.
    keys_alike: Tensor,
}

impl<'a> PooledCall<'a> {
    fn new(q: &Tensor, k: &Tensor, shape: &'a AttnShape, scale: f32) -> Result<Self, BaselineError> {
        let dim = shape.head_dim();
        // Behind the mean, the self-similarity of the block as one more element: the tokens are read once.
        let pool = |tokens: &Tensor| -> Result<Tensor, BaselineError> {
            let norm = tokens.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(f64::from(f32::MIN_POSITIVE))?;
            // The mean of all products is the square of the mean.
            let alike = tokens.broadcast_div(&norm)?.mean(3)?.sqr()?.sum_keepdim(D::Minus1)?;
            Ok(Tensor::cat(&[tokens.mean(3)?, alike], 3)?)
        };
        let mean_key = by_blocks(k, 0, BLOCK_K, |keys| Ok(keys.sum(3)?))?.sum_keepdim(2)?;
        let mean_key = (mean_key / shape.k_len() as f64)?.unsqueeze(3)?;
        let queries = by_blocks(q, shape.kv_offset(), BLOCK_Q, pool)?;
        let keys = by_blocks(k, 0, BLOCK_K, |keys| pool(&keys.broadcast_sub(&mean_key)?))?;
        let means = |pooled: &Tensor| pooled.narrow(3, 0, dim)?.contiguous();
        let scores = (grouped_products(&means(&queries)?, &means(&keys)?)? * f64::from(scale))?;
        let (batch, kv_heads, key_blocks, _) = keys.dims4()?;
        let group = shape.num_heads() / kv_heads;
        let keys_alike = keys.narrow(3, dim, 1)?.reshape((batch, kv_heads, 1, key_blocks))?;
        let keys_alike = keys_alike.broadcast_as((batch, kv_heads, group, key_blocks))?.contiguous()?;
        Ok(Self {
            shape,
            scores,
            queries_alike: queries.narrow(3, dim, 1)?.contiguous()?,
            keys_alike: keys_alike.reshape((batch, shape.num_heads(), 1, key_blocks))?,
        })
    }

    /// A mask of the form of the scores, beyond the diagonal undefined.
    fn choose(&self, heads: &[SpargeHead]) -> Result<Tensor, BaselineError> {
        let device = self.scores.device();
        let thetas: Vec<f32> = heads.iter().map(|head| head.theta as f32).collect();
        let thetas = Tensor::new(thetas, device)?.reshape((1, heads.len(), 1, 1))?;
        let all: Vec<u8> = heads.iter().map(|head| u8::from(head.tau >= 1.0)).collect();
        let all = Tensor::new(all, device)?.reshape((1, heads.len(), 1, 1))?;
        let taus: Vec<f64> = (0..self.shape.batch()).flat_map(|_| heads.iter().map(|head| head.tau)).collect();

        let causal = causal_blocks(self.shape, BLOCK_K, device)?;
        let trusted = self.keys_alike.broadcast_ge(&thetas)?;
        let attention = masked_softmax(&self.scores, &trusted.broadcast_mul(&causal)?)?;
        let chosen = top_cdf_by_group(&attention, &taus)?;
        let own = BLOCK_Q / BLOCK_K;
        let forced = bands(self.shape, BLOCK_K, device, |query_block| Bands {
            sink: 1,
            window: query_block * own..(query_block + 1) * own,
        })?;
        let chosen = chosen.broadcast_maximum(&self.keys_alike.broadcast_lt(&thetas)?)?;
        let chosen = chosen.broadcast_maximum(&self.queries_alike.broadcast_lt(&thetas)?)?;
        Ok(chosen.broadcast_maximum(&all)?.broadcast_maximum(&forced)?.to_dtype(DType::U8)?)
    }
}
