//! Tensors of one length: `q` (batch, q_len, num_heads, head_dim), `k` and `v` (batch, k_len, num_kv_heads, head_dim).

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};

use crate::engine::{self, Call};
use crate::error::FlashAttnError;
use crate::mask::Window;

/// Attention as a Candle op. As an op it copies its inputs and its output once. The functions of this crate do not copy
/// their inputs.
#[derive(Debug, Clone)]
pub struct FlashAttn {
    /// Factor on `q . k` before the softmax.
    pub softmax_scale: f32,
    /// ALiBi slopes (num_heads), f32.
    pub alibi_slopes: Option<Tensor>,
    /// Number of keys left of its position that a query sees; `None` for all.
    pub window_size_left: Option<usize>,
    /// Number of keys right of its position that a query sees; `None` for all, `Some(0)` for causal.
    pub window_size_right: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> std::result::Result<Tensor, FlashAttnError> {
        let k_len = k.dims().get(1).copied().unwrap_or_default();
        let call = Call {
            softmax_scale: self.softmax_scale,
            window: Window::new(self.window_size_left, self.window_size_right, k_len),
            alibi_slopes: self.alibi_slopes.as_ref(),
            softcap: self.softcap,
            ranges: Vec::new(),
            may_skip: true,
        };
        engine::dispatch(q, k, v, &call)
    }

    fn on_storage<S: Held + BackendStorage<Device: BackendDevice<Storage = S>>>(
        &self,
        operands: [(&S, &Layout); 3],
    ) -> Result<(S, Shape)> {
        let mut tensors = Vec::with_capacity(operands.len());
        for (storage, layout) in operands {
            let storage = S::hold(owned(storage, layout)?);
            tensors.push(Tensor::from_storage(storage, layout.shape(), BackpropOp::none(), false));
        }
        let out = self.run(&tensors[0], &tensors[1], &tensors[2])?;
        let (storage, layout) = out.storage_and_layout();
        let held = S::held(&storage).ok_or_else(|| candle_core::Error::msg("the output changed its device"))?;
        Ok((owned(held, layout)?, out.shape().clone()))
    }
}

/// A contiguous copy of the elements in `layout`.
fn owned<S: BackendStorage<Device: BackendDevice<Storage = S>>>(storage: &S, layout: &Layout) -> Result<S> {
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(copy)
}

/// Conversion between a backend's storage and Candle's [`Storage`].
trait Held: Sized {
    fn hold(self) -> Storage;
    fn held(storage: &Storage) -> Option<&Self>;
}

impl Held for CpuStorage {
    fn hold(self) -> Storage {
        Storage::Cpu(self)
    }

    fn held(storage: &Storage) -> Option<&Self> {
        if let Storage::Cpu(held) = storage { Some(held) } else { None }
    }
}

impl Held for CudaStorage {
    fn hold(self) -> Storage {
        Storage::Cuda(self)
    }

    fn held(storage: &Storage) -> Option<&Self> {
        if let Storage::Cuda(held) = storage { Some(held) } else { None }
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_storage([(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_storage([(q, q_layout), (k, k_layout), (v, v_layout)])
    }
}

/// A softcap that has no effect.
const NO_SOFTCAP: f32 = 0.0;

/// Attention of `q` (batch, q_len, num_heads, head_dim) to `k`, `v` (batch, k_len, num_kv_heads, head_dim):
/// `softmax(softmax_scale * q k^T) v`, causal if `causal`. Returns the shape and dtype of `q`. The policy
/// ([`crate::s2o`]) makes long causal calls sparse.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let q = Tensor::randn(0f32, 1.0, (1, 100, 4, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1.0, (1, 100, 2, 64), &Device::Cpu)?;
/// let out = s2o_flash_attn::flash_attn(&q, &kv, &kv, 0.125, true)?;
/// assert_eq!(out.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// [`flash_attn`] in which a query sees `window_size_left` keys before and `window_size_right` keys after its position.
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let (left, right) = (window_size_left, window_size_right);
    flash_attn_alibi_windowed_softcap(q, k, v, None, softmax_scale, left, right, NO_SOFTCAP)
}

/// [`flash_attn`] with `alibi_slopes[head] * distance` subtracted from the scores. The slopes are (num_heads), f32.
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, causal.then_some(0))
}

/// [`flash_attn_alibi`] with the windows of [`flash_attn_windowed`].
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let (left, right) = (window_size_left, window_size_right);
    flash_attn_alibi_windowed_softcap(q, k, v, Some(alibi_slopes), softmax_scale, left, right, NO_SOFTCAP)
}

/// [`flash_attn_alibi_windowed`] with scores capped to `softcap * tanh(score / softcap)` before ALiBi. A `softcap` that
/// is not positive has no effect.
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: alibi_slopes.cloned(),
        window_size_left,
        window_size_right,
        softcap: Some(softcap),
    };
    Ok(op.run(q, k, v)?)
}
