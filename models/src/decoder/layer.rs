//! A layer: norms, attention and MLP.

use std::ops::Range;

use crate::attention::{Phase, SelfAttention};
use crate::config::DecoderConfig;
use crate::error::Result;
use crate::fused::Rotation;
use crate::kv_cache::KvCache;
use crate::layers::{Mlp, Norm, Residual, Shared, Weights};
use crate::parallel::{Parallel, Shards};

#[derive(Debug)]
pub(super) struct Layer {
    input_norm: Norm,
    pub(super) attention: SelfAttention,
    post_norm: Norm,
    mlp: Shared<Mlp>,
}

impl Layer {
    pub(super) fn load(
        config: &DecoderConfig,
        layer: usize,
        weights: &Weights,
        parallel: Option<&Parallel>,
    ) -> Result<Self> {
        let norm = |name: &str| Norm::load(config.hidden_size, config.rms_norm_eps, &weights.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: SelfAttention::load(config, layer, &weights.pp("self_attn"), parallel)?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(config, &weights.pp("mlp"), parallel)?,
        })
    }

    /// The residual stream after the layer, for the positions of the chunk from `first` on; `None` if there are none. The
    /// keys and values of all positions go to the cache. `residual` is in memory of its own, which may be reused.
    pub(super) fn forward(
        &self,
        residual: Residual,
        rotation: &Rotation,
        cache: &mut KvCache,
        phase: Phase,
        shards: Option<Shards>,
        first: usize,
    ) -> Result<Option<Residual>> {
        let residual = {
            let _span = tracing::debug_span!("attention", layer = self.attention.layer()).entered();
            let (x, normed) = self.input_norm.forward_rows(residual, self.attention.takes_int8())?;
            let q = self.attention.project(normed, rotation, cache, shards)?;
            let len = q.dim(1)?;
            let rows = len - first;
            if rows == 0 {
                return Ok(None);
            }
            let own = |range: Range<usize>| Ok(x.narrow(1, range.start, range.len())?.contiguous()?);
            let (x, q) = match (first, shards) {
                (0, _) => (x, q),
                (_, None) => (own(first..len)?, q.narrow(1, first, rows)?),
                // Few positions: every rank computes all of them.
                (_, Some(shards)) => (shards.gather(first, &x, own)?, q.narrow(1, first, rows)?),
            };
            self.attention.attend(x, q, len, cache, phase, shards)?
        };
        let _span = tracing::debug_span!("mlp", layer = self.attention.layer()).entered();
        let (x, normed) = self.post_norm.forward_rows(residual, self.mlp.whole().takes_int8())?;
        Ok(Some(match self.mlp.complete(shards) {
            Some(mlp) => mlp.after(x, normed)?,
            None => Residual::new(x, self.mlp.of_part(|mlp| mlp.forward(normed))?),
        }))
    }
}
