//! S2O attention.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Shape, Tensor};
use s2o_core::{AttnShape, AttnStats, Ranking, S2oConfig, ScoreScale};

use crate::attn_op::{AttnOp, apply, compute, forward};
use crate::error::AttnError;
use crate::pending_stats::PendingStats;

/// S2O sparse causal attention for prefill. Layout and causal convention are those of `candle-flash-attn`.
///
/// `q` is (batch, q_len, num_heads, head_dim), `k` and `v` are (batch, k_len, num_kv_heads, head_dim), all on one
/// device. The CPU supports f32, f16 and bf16 and a `head_dim` that is a multiple of 8 up to 256. A GPU (feature
/// `cuda`) supports f16 and bf16 and a `head_dim` of 64, 128 or 256. Accumulation is in f32. Queries are the last `q_len` of
/// the `k_len` positions, and the prompt ends with them. The output has the shape and dtype of `q`.
///
/// Memory besides the output: at most [`S2oConfig::workspace_cap`] for the key orders. The CPU also needs about 2 MiB
/// per thread at the default tiles, one byte per output row, and 48 bytes of statistics per query tile and head.
///
/// # Errors
/// If the tensors or options do not fit, see [`AttnError`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_s2o::{S2oConfig, s2o_attn};
/// let q = Tensor::randn(0f32, 1.0, (1, 2048, 4, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1.0, (1, 2048, 2, 64), &Device::Cpu)?;
/// let out = s2o_attn(&q, &kv, &kv, 0.125, &S2oConfig::default())?;
/// assert_eq!(out.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn s2o_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    config: &S2oConfig,
) -> Result<Tensor, AttnError> {
    S2oOp::new(softmax_scale, config.clone()).apply(q, k, v)
}

/// [`s2o_attn`] with statistics of the computed and skipped work per head. On a GPU the host waits for them.
pub fn s2o_attn_with_stats(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    config: &S2oConfig,
) -> Result<(Tensor, AttnStats), AttnError> {
    S2oOp::new(softmax_scale, config.clone()).apply_with_stats(q, k, v)
}

/// S2O attention as a Candle op on `q` (batch, q_len, num_heads, head_dim) and `k`, `v` (batch, k_len, num_kv_heads,
/// head_dim), in any layout. Most callers should use [`s2o_attn`].
#[derive(Debug, Clone)]
pub struct S2oOp {
    pub(crate) config: S2oConfig,
    pub(crate) scale: ScoreScale,
    /// Length in tokens of the prompt that a call belongs to, if the call is not all of it.
    pub(crate) prompt_len: Option<usize>,
    /// Orders to use instead of running Algorithm 1.
    pub(crate) ranking: Option<Arc<Ranking>>,
    /// Whether a GPU keeps the statistics after the call.
    pub(crate) wants_stats: bool,
}

impl S2oOp {
    /// Creates an op for a prompt that ends with the call's last query, as far as is known: with keys before the first query
    /// the call may be any chunk, and an automatic threshold is that of [`Tau::of_chunk`](s2o_core::Tau::of_chunk).
    pub fn new(softmax_scale: f32, config: S2oConfig) -> Self {
        Self { config, scale: softmax_scale.into(), prompt_len: None, ranking: None, wants_stats: false }
    }

    /// Caps the scores: `softcap * tanh(softmax_scale * <q, k> / softcap)`, as in Gemma 2. The keys are ranked by the
    /// scores without the cap, which does not change the order of the keys of one query.
    pub fn with_softcap(mut self, softcap: f32) -> Self {
        self.scale.softcap = Some(softcap);
        self
    }

    /// Makes the call a chunk of a prompt of `prompt_len` tokens. The call's keys begin at the start of the prompt.
    pub fn with_prompt_len(mut self, prompt_len: usize) -> Self {
        self.prompt_len = Some(prompt_len);
        self
    }

    /// The options and the prompt length of a call.
    pub(crate) fn settings(&self, shape: &AttnShape) -> (Cow<'_, S2oConfig>, usize) {
        let k_len = shape.k_len();
        match self.prompt_len {
            Some(prompt_len) => (Cow::Borrowed(&self.config), prompt_len),
            None if shape.q_offset() == 0 => (Cow::Borrowed(&self.config), k_len),
            None => {
                let config = self.config.to_builder().tau(self.config.tau().of_chunk(k_len)).build();
                (Cow::Owned(config.expect("another valid threshold")), k_len)
            }
        }
    }

    /// Uses the caller's orders of keys and queries instead of running Algorithm 1.
    pub fn with_ranking(mut self, ranking: impl Into<Arc<Ranking>>) -> Self {
        self.ranking = Some(ranking.into());
        self
    }

    /// Applies the op. Gradients are not supported: `backward` through the output is an error.
    ///
    /// # Errors
    /// If the tensors or options do not fit, see [`AttnError`].
    pub fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, AttnError> {
        Ok(apply(&self, self.scale, [q, k, v])?.0)
    }

    /// [`S2oOp::apply`] with statistics of the computed and skipped work per head. On a GPU the host waits for them.
    ///
    /// # Errors
    /// The same as [`S2oOp::apply`].
    pub fn apply_with_stats(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, AttnStats), AttnError> {
        let (out, stats) = self.apply_with_pending_stats(q, k, v)?;
        Ok((out, stats.read()?))
    }

    /// [`S2oOp::apply_with_stats`] without waiting for a GPU: the statistics can be read later.
    ///
    /// # Errors
    /// The same as [`S2oOp::apply`].
    pub fn apply_with_pending_stats(
        mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<(Tensor, PendingStats), AttnError> {
        self.wants_stats = true;
        let (out, stats) = apply(&self, self.scale, [q, k, v])?;
        Ok((out, stats.ok_or_else(|| candle_core::Error::msg("the forward pass returned no statistics"))?))
    }

    /// Runs only Algorithm 1 on the device of the tensors: returns the orders of every head (`b * num_heads + h`) and
    /// segment. On a GPU the host waits for the orders, and in prompts of more than 98,304 tokens the best 39,936 keys,
    /// to the end of a bucket, are sorted; the others follow in their natural order. With `StopRule::MeanRatio` and `SumRatio`
    /// all are sorted.
    ///
    /// # Errors
    /// The same as [`S2oOp::apply`].
    pub fn rank(self, q: &Tensor, k: &Tensor) -> Result<Ranking, AttnError> {
        // The ranking does not read the values.
        let scale = self.scale;
        Ok(compute(&RankOp(self), scale, [q, k, k])?.1)
    }
}

impl AttnOp for S2oOp {
    const NAME: &'static str = "s2o-attention";
    /// Always present on the CPU, on a GPU only on request.
    type Report = Option<PendingStats>;
}

/// The ranking of an [`S2oOp`].
#[derive(Debug)]
pub(crate) struct RankOp(pub(crate) S2oOp);

impl AttnOp for RankOp {
    const NAME: &'static str = "s2o-ranking";
    const HAS_OUTPUT: bool = false;
    type Report = Ranking;
}

/// For callers that let Candle apply the op: `q.apply_op3(&k, &v, op)` is the same as [`S2oOp::apply`], but returns a
/// [`candle_core::Error`] with the message of the [`AttnError`] and not its type.
impl CustomOp3 for S2oOp {
    fn name(&self) -> &'static str {
        <Self as AttnOp>::NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        forward(self, self.scale, [(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        forward(self, self.scale, [(q, q_layout), (k, k_layout), (v, v_layout)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use s2o_core::Tau;

    #[test]
    fn a_chunk_without_an_end_has_its_own_threshold() {
        let tau = |op: &S2oOp, q_len| {
            let (config, prompt_len) = op.settings(&AttnShape::new([1, q_len, 1, 64], [100_000, 1]).unwrap());
            (config.tau().resolve(prompt_len), prompt_len)
        };
        let op = S2oOp::new(1.0, S2oConfig::default());
        assert_eq!(tau(&op, 100_000), (0.025, 100_000), "a whole prompt");
        assert_eq!(tau(&op, 4000), (0.02, 100_000), "a chunk");
        assert_eq!(tau(&op.with_prompt_len(120_000), 4000), (0.025, 120_000), "a chunk whose end is known");
        let fixed = S2oConfig::builder().tau(Tau::Fixed(0.3)).build().unwrap();
        assert_eq!(tau(&S2oOp::new(1.0, fixed), 4000), (0.3, 100_000));
    }
}
