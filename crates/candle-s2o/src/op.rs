//! The Candle ops, and the functions that apply them.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Shape, Tensor};
use s2o::cpu::{self, Element, Inputs};
use s2o::{AttnStats, S2oConfig, S2oError};

use crate::cpu::{Kernel, run};
use crate::error::AttnError;

/// S2O attention as a Candle op on `q` (batch, q_len, num_heads, head_dim) and `k`, `v` (batch, k_len, num_kv_heads,
/// head_dim), f32, f16 or bf16, in any layout. Most callers want [`s2o_attn`].
#[derive(Debug, Clone)]
pub struct S2oOp {
    config: S2oConfig,
    softmax_scale: f32,
    prompt_len: Option<usize>,
    /// How the last forward ended: Candle's signature has room for neither statistics nor a typed error.
    outcome: Arc<Mutex<Option<Result<AttnStats, AttnError>>>>,
}

impl S2oOp {
    /// An op for a prompt that ends with the call's last query.
    pub fn new(softmax_scale: f32, config: S2oConfig) -> Self {
        Self { config, softmax_scale, prompt_len: None, outcome: Arc::default() }
    }

    /// Makes the call a chunk of a prompt of `prompt_len` tokens, its keys from the prompt's beginning.
    pub fn with_prompt_len(mut self, prompt_len: usize) -> Self {
        self.prompt_len = Some(prompt_len);
        self
    }

    /// Applies the op. Gradients are not supported: `backward` through the output is an error.
    ///
    /// # Errors
    /// If the tensors or options do not fit, see [`AttnError`].
    pub fn apply(mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, AttnStats), AttnError> {
        check_tensors(q, k, v)?;
        // Of this application alone: clones of the op may be at work elsewhere.
        self.outcome = Arc::default();
        let outcome = Arc::clone(&self.outcome);
        let result = q.apply_op3(k, v, self);
        let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (result, outcome) {
            (Ok(out), Some(Ok(stats))) => Ok((out, stats)),
            (_, Some(Err(typed))) => Err(typed),
            (Err(error), _) => Err(error.into()),
            // Only a backend that forgets its statistics comes here: an error, not a wrong answer.
            (Ok(_), None) => Err(candle_core::Error::msg("the forward pass left no statistics").into()),
        }
    }
}

impl Kernel for S2oOp {
    type Report = AttnStats;

    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<AttnStats, AttnError> {
        let prompt_len = self.prompt_len.unwrap_or(inputs.shape().k_len());
        Ok(cpu::attention(inputs, &self.config, prompt_len, out)?)
    }
}

impl CustomOp3 for S2oOp {
    fn name(&self) -> &'static str {
        "s2o-attention"
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
        let result = run(self, [(q, q_layout), (k, k_layout), (v, v_layout)], self.softmax_scale);
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok((storage, shape, stats)) => {
                *outcome = Some(Ok(stats));
                Ok((storage, shape))
            }
            Err(error) => {
                let message = candle_core::Error::msg(&error);
                *outcome = Some(Err(error));
                Err(message)
            }
        }
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        Err(AttnError::Device { name: "q", got: "CUDA" }.into())
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
        Err(AttnError::Device { name: "q", got: "Metal" }.into())
    }
}

/// Dense attention as a Candle op, by the engine that S2O uses for its windows. Only [`dense_attn`] applies it, which
/// refuses other devices before Candle asks for them.
#[derive(Debug, Clone, Copy)]
struct DenseOp {
    softmax_scale: f32,
    causal: bool,
}

impl Kernel for DenseOp {
    type Report = ();

    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<(), AttnError> {
        cpu::dense(inputs, self.causal, out);
        Ok(())
    }
}

impl CustomOp3 for DenseOp {
    fn name(&self) -> &'static str {
        "s2o-dense-attention"
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
        let (storage, shape, ()) = run(self, [(q, q_layout), (k, k_layout), (v, v_layout)], self.softmax_scale)?;
        Ok((storage, shape))
    }
}

/// S2O sparse causal attention for prefill. Layout and causal convention are those of `candle-flash-attn`.
///
/// `q` is (batch, q_len, num_heads, head_dim), `k` and `v` are (batch, k_len, num_kv_heads, head_dim), all f32, f16 or
/// bf16 with f32 accumulation; `head_dim` is a multiple of 8 up to 256. Queries are the last `q_len` of the `k_len`
/// positions, and the prompt ends with them. Returns (batch, q_len, num_heads, head_dim) in the dtype of `q`.
///
/// Memory beside the output: [`S2oConfig::workspace_cap`] for the key orders, about 2 MiB per thread at the default
/// tiles, a byte per output row, and the statistics (64 bytes per query tile and head).
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
    Ok(s2o_attn_with_stats(q, k, v, softmax_scale, config)?.0)
}

/// [`s2o_attn`], and what was computed and skipped per head.
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
    S2oOp::new(softmax_scale, config.clone()).apply(q, k, v)
}

/// Exact attention by the same engine, shapes and dtypes as in [`s2o_attn`]. If `causal`, queries are the last `q_len`
/// positions (bottom-right causal); else each sees every key. Gradients are not supported.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`].
pub fn dense_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor, AttnError> {
    check_tensors(q, k, v)?;
    if !softmax_scale.is_finite() {
        return Err(S2oError::SoftmaxScale { got: softmax_scale }.into());
    }
    Ok(q.apply_op3(k, v, DenseOp { softmax_scale, causal })?)
}

/// What can be said before Candle's dispatch, so that the error keeps its type.
fn check_tensors(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(), AttnError> {
    let mut dims = [[0; 4]; 3];
    for ((name, tensor), dims) in [("q", q), ("k", k), ("v", v)].into_iter().zip(&mut dims) {
        *dims = tensor.dims().try_into().map_err(|_| AttnError::Rank { name, got: tensor.dims().to_vec() })?;
        if !matches!(tensor.dtype(), candle_core::DType::F32 | candle_core::DType::F16 | candle_core::DType::BF16) {
            return Err(AttnError::DType { name, got: tensor.dtype() });
        }
        if !tensor.device().is_cpu() {
            let got = if tensor.device().is_cuda() { "CUDA" } else { "Metal" };
            return Err(AttnError::Device { name, got });
        }
        if tensor.dtype() != q.dtype() {
            return Err(AttnError::DTypeMismatch { name, expected: q.dtype(), got: tensor.dtype() });
        }
    }
    let [q_dims, k_dims, v_dims] = dims;
    s2o::AttnShape::of(q_dims, k_dims, v_dims).map_err(S2oError::from)?;
    Ok(())
}
