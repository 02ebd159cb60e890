//! A layer: norms, attention and MLP.

use std::ops::Range;

use candle_core::Tensor;

use crate::attention::{Phase, SelfAttention};
use crate::config::DecoderConfig;
use crate::error::Result;
use crate::fused::Rotation;
use crate::kv_cache::KvCache;
use crate::layers::{Mlp, Norm, Shared, Weights};
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

    /// Adds `delta` of the previous layer to the residual stream `x`. Returns the stream after attention, and the
    /// output of the MLP that is still to be added, both for the positions of the chunk from `first` on; `None` if
    /// there are none. The keys and values of all positions go to the cache.
    #[expect(clippy::too_many_arguments, reason = "each is a part of the state of a forward pass")]
    pub(super) fn forward(
        &self,
        x: Tensor,
        delta: Option<Tensor>,
        rotation: &Rotation,
        cache: &mut KvCache,
        phase: Phase,
        shards: Option<Shards>,
        first: usize,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let (x, attended) = {
            let _span = tracing::debug_span!("attention", layer = self.attention.layer()).entered();
            let (x, normed) = self.input_norm.forward_rows(x, delta, self.attention.takes_int8())?;
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
            (x, self.attention.attend(q, len, cache, phase, shards)?)
        };
        let _span = tracing::debug_span!("mlp", layer = self.attention.layer()).entered();
        let (x, normed) = self.post_norm.forward_rows(x, Some(attended), self.mlp.whole().takes_int8())?;
        let mixed = match shards {
            None => self.mlp.of_part(|mlp| mlp.forward(normed))?,
            Some(_) => self.mlp.whole().forward(normed)?,
        };
        Ok(Some((x, mixed)))
    }
}
