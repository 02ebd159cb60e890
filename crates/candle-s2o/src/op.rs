//! The Candle ops, and the functions that apply them.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage, Shape, Tensor};
use s2o_core::cpu::{self, Element, Inputs};
use s2o_core::{AttnShape, AttnStats, Ranking, S2oConfig, S2oError};

use crate::error::AttnError;

/// What an op computes, on every backend that it knows.
pub(crate) trait Kernel: Debug + Send + Sync + 'static {
    const NAME: &'static str;
    type Report: Debug + Send;

    fn softmax_scale(&self) -> f32;

    /// On the CPU, into `out`.
    fn cpu<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Self::Report, AttnError>;

    /// On a GPU.
    #[cfg(feature = "cuda")]
    fn cuda(&self, call: &crate::cuda::Call) -> Result<Self::Report, AttnError>;
}

/// How the last forward pass ended: Candle's signature has room for neither a report nor a typed error.
type Outcome<R> = Arc<Mutex<Option<Result<R, AttnError>>>>;

/// A kernel as Candle applies it.
#[derive(Debug)]
struct Applied<K: Kernel> {
    kernel: K,
    outcome: Outcome<K::Report>,
}

impl<K: Kernel> Applied<K> {
    fn new(kernel: K) -> Self {
        Self { kernel, outcome: Arc::default() }
    }

    fn keep<S>(&self, result: Result<(S, Shape, K::Report), AttnError>) -> candle_core::Result<(S, Shape)> {
        let (outcome, result) = match result {
            Ok((storage, shape, report)) => (Ok(report), Ok((storage, shape))),
            Err(error) => {
                let message = candle_core::Error::msg(&error);
                (Err(error), Err(message))
            }
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        result
    }
}

impl<K: Kernel> CustomOp3 for Applied<K> {
    fn name(&self) -> &'static str {
        K::NAME
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
        self.keep(crate::cpu::run(&self.kernel, [(q, q_layout), (k, k_layout), (v, v_layout)]))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.keep(crate::cuda::run(&self.kernel, [(q, q_layout), (k, k_layout), (v, v_layout)]))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.keep(Err(AttnError::Device { name: "q", got: "CUDA" }))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.keep(Err(AttnError::Device { name: "q", got: "Metal" }))
    }
}

/// Applies a kernel to tensors that fit each other, and returns its report or its typed error.
pub(crate) fn apply<K: Kernel>(
    kernel: K,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(Tensor, K::Report), AttnError> {
    check_tensors(q, k, v)?;
    let op = Applied::new(kernel);
    let outcome = Arc::clone(&op.outcome);
    let result = q.apply_op3(k, v, op);
    let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (result, outcome) {
        (Ok(out), Some(Ok(report))) => Ok((out, report)),
        (_, Some(Err(typed))) => Err(typed),
        (Err(error), _) => Err(error.into()),
        (Ok(_), None) => Err(candle_core::Error::msg("the forward pass left no report").into()),
    }
}

/// S2O attention as a Candle op on `q` (batch, q_len, num_heads, head_dim) and `k`, `v` (batch, k_len, num_kv_heads,
/// head_dim), in any layout. Most callers want [`s2o_attn`].
#[derive(Debug, Clone)]
pub struct S2oOp {
    config: S2oConfig,
    softmax_scale: f32,
    prompt_len: Option<usize>,
    ranking: Option<Arc<Ranking>>,
    wants_stats: bool,
}

impl S2oOp {
    /// An op for a prompt that ends with the call's last query.
    pub fn new(softmax_scale: f32, config: S2oConfig) -> Self {
        Self { config, softmax_scale, prompt_len: None, ranking: None, wants_stats: false }
    }

    /// Makes the call a chunk of a prompt of `prompt_len` tokens, its keys from the prompt's beginning.
    pub fn with_prompt_len(mut self, prompt_len: usize) -> Self {
        self.prompt_len = Some(prompt_len);
        self
    }

    /// Takes the orders of keys and queries from the caller instead of Algorithm 1.
    pub fn with_ranking(mut self, ranking: impl Into<Arc<Ranking>>) -> Self {
        self.ranking = Some(ranking.into());
        self
    }

    /// Applies the op. Gradients are not supported: `backward` through the output is an error.
    ///
    /// # Errors
    /// If the tensors or options do not fit, see [`AttnError`].
    pub fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, AttnError> {
        Ok(apply(self, q, k, v)?.0)
    }

    /// [`S2oOp::apply`], and what was computed and skipped per head. On a GPU the host waits for them.
    ///
    /// # Errors
    /// As [`S2oOp::apply`].
    pub fn apply_with_stats(mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, AttnStats), AttnError> {
        self.wants_stats = true;
        let (out, stats) = apply(self, q, k, v)?;
        Ok((out, stats.ok_or_else(|| candle_core::Error::msg("the forward pass left no statistics"))?))
    }

    /// [`S2oOp::apply`] on a GPU, and the time of each kernel in the order of their launches. The host waits for them.
    ///
    /// # Errors
    /// As [`S2oOp::apply`]; [`AttnError::GpuOnly`] for tensors on the CPU.
    #[cfg(feature = "cuda")]
    pub fn apply_timed(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<(Tensor, Vec<crate::cuda::KernelTime>), AttnError> {
        apply(crate::cuda::TimedOp(self), q, k, v)
    }

    /// Algorithm 1 alone, on the device of the tensors: the orders of every head (`b * num_heads + h`) and segment.
    ///
    /// # Errors
    /// As [`S2oOp::apply`].
    pub fn rank(self, q: &Tensor, k: &Tensor) -> Result<Ranking, AttnError> {
        // The values do not matter; the output is not written.
        Ok(apply(RankOp(self), q, k, k)?.1)
    }

    fn prompt_len(&self, shape: &AttnShape) -> usize {
        self.prompt_len.unwrap_or(shape.k_len())
    }
}

/// The ranking of an [`S2oOp`].
#[derive(Debug)]
struct RankOp(S2oOp);

impl Kernel for RankOp {
    const NAME: &'static str = "s2o-ranking";
    type Report = Ranking;

    fn softmax_scale(&self) -> f32 {
        self.0.softmax_scale
    }

    fn cpu<T: Element>(&self, inputs: &Inputs<'_, T>, _: &mut [T]) -> Result<Ranking, AttnError> {
        Ok(cpu::rank(inputs, &self.0.config, self.0.prompt_len(inputs.shape()))?)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, call: &crate::cuda::Call) -> Result<Ranking, AttnError> {
        crate::cuda::rank(call, &self.0.config, self.0.prompt_len(call.shape()))
    }
}

impl Kernel for S2oOp {
    const NAME: &'static str = "s2o-attention";
    type Report = Option<AttnStats>;

    fn softmax_scale(&self) -> f32 {
        self.softmax_scale
    }

    fn cpu<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Option<AttnStats>, AttnError> {
        let prompt_len = self.prompt_len(inputs.shape());
        let stats = match &self.ranking {
            Some(ranking) => cpu::attention_with_ranking(inputs, &self.config, prompt_len, ranking, out)?,
            None => cpu::attention(inputs, &self.config, prompt_len, out)?,
        };
        Ok(Some(stats))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, call: &crate::cuda::Call) -> Result<Option<AttnStats>, AttnError> {
        let request = crate::cuda::Request {
            config: &self.config,
            prompt_len: self.prompt_len(call.shape()),
            ranking: self.ranking.as_deref(),
            wants_stats: self.wants_stats,
        };
        crate::cuda::s2o(call, &request)
    }
}

/// For callers that apply ops themselves; the error that comes back through Candle has its words, not its type.
impl CustomOp3 for S2oOp {
    fn name(&self) -> &'static str {
        Self::NAME
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
        Applied::new(self.clone()).cpu_fwd(q, q_layout, k, k_layout, v, v_layout)
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
        Applied::new(self.clone()).cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
    }

    fn metal_fwd(
        &self,
        q: &MetalStorage,
        q_layout: &Layout,
        k: &MetalStorage,
        k_layout: &Layout,
        v: &MetalStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        Applied::new(self.clone()).metal_fwd(q, q_layout, k, k_layout, v, v_layout)
    }
}

/// Dense attention, by the engine that S2O uses for its windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseOp {
    pub(crate) softmax_scale: f32,
    pub(crate) causal: bool,
}

impl Kernel for DenseOp {
    const NAME: &'static str = "s2o-dense-attention";
    type Report = ();

    fn softmax_scale(&self) -> f32 {
        self.softmax_scale
    }

    fn cpu<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<(), AttnError> {
        cpu::dense(inputs, self.causal, out);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, call: &crate::cuda::Call) -> Result<(), AttnError> {
        crate::cuda::dense(call, self.causal)
    }
}

/// S2O sparse causal attention for prefill. Layout and causal convention are those of `candle-flash-attn`.
///
/// `q` is (batch, q_len, num_heads, head_dim), `k` and `v` are (batch, k_len, num_kv_heads, head_dim), all on one device.
/// On the CPU f32, f16 or bf16 and a `head_dim` that is a multiple of 8 up to 256; on a GPU (feature `cuda`) f16 or bf16
/// and 64 or 128. Accumulation is f32. Queries are the last `q_len` of the `k_len` positions, and the prompt ends with
/// them. Returns (batch, q_len, num_heads, head_dim) in the dtype of `q`.
///
/// Memory beside the output: [`S2oConfig::workspace_cap`] for the key orders; on the CPU about 2 MiB per thread at the
/// default tiles, a byte per output row, and the statistics (80 bytes per query tile and head).
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

/// [`s2o_attn`], and what was computed and skipped per head. On a GPU the host waits for them.
///
/// # Errors
/// As [`s2o_attn`].
pub fn s2o_attn_with_stats(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    config: &S2oConfig,
) -> Result<(Tensor, AttnStats), AttnError> {
    S2oOp::new(softmax_scale, config.clone()).apply_with_stats(q, k, v)
}

/// Exact attention by the same engine, shapes and dtypes as in [`s2o_attn`]. If `causal`, queries are the last `q_len`
/// positions (bottom-right causal); else each sees every key. Gradients are not supported.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor, AttnError> {
    Ok(apply(DenseOp { softmax_scale, causal }, q, k, v)?.0)
}

/// What can be said before Candle's dispatch, so that the error keeps its type.
fn check_tensors(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(), AttnError> {
    let mut dims = [[0; 4]; 3];
    for ((name, tensor), dims) in [("q", q), ("k", k), ("v", v)].into_iter().zip(&mut dims) {
        *dims = tensor.dims().try_into().map_err(|_| AttnError::Rank { name, got: tensor.dims().to_vec() })?;
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(AttnError::DType { name, got: tensor.dtype() });
        }
        if tensor.device().is_metal() || (tensor.device().is_cuda() && cfg!(not(feature = "cuda"))) {
            let got = if tensor.device().is_cuda() { "CUDA" } else { "Metal" };
            return Err(AttnError::Device { name, got });
        }
        if !tensor.device().same_device(q.device()) {
            let [expected, got] = [q, tensor].map(|tensor| tensor.device().location());
            return Err(AttnError::DeviceMismatch { name, expected, got });
        }
        if tensor.dtype() != q.dtype() {
            return Err(AttnError::DTypeMismatch { name, expected: q.dtype(), got: tensor.dtype() });
        }
    }
    let [q_dims, k_dims, v_dims] = dims;
    s2o_core::AttnShape::of(q_dims, k_dims, v_dims).map_err(S2oError::from)?;
    Ok(())
}
