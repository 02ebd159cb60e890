//! Tensors of one length: `q` (batch, q_len, num_heads, head_dim), `k` and `v` (batch, k_len, num_kv_heads, head_dim).

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};

use crate::engine::{self, Call, FlashAttn};

impl FlashAttn {
    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let window = self.window(k.dims().get(1).copied().unwrap_or_default());
        Ok(engine::dispatch(q, k, v, &Call { op: self, window, ranges: Vec::new(), may_skip: true })?)
    }

    /// `hold` and `held` convert between the backend's storage and Candle's.
    fn on_storage<S: BackendStorage<Device: BackendDevice<Storage = S>>>(
        &self,
        operands: [(&S, &Layout); 3],
        hold: fn(S) -> Storage,
        held: fn(&Storage) -> Option<&S>,
    ) -> Result<(S, Shape)> {
        let mut tensors = Vec::with_capacity(operands.len());
        for (storage, layout) in operands {
            let storage = hold(owned(storage, layout)?);
            tensors.push(Tensor::from_storage(storage, layout.shape(), BackpropOp::none(), false));
        }
        let out = self.run(&tensors[0], &tensors[1], &tensors[2])?;
        let (storage, layout) = out.storage_and_layout();
        let held = held(&storage).ok_or_else(|| candle_core::Error::msg("the output changed its device"))?;
        Ok((owned(held, layout)?, out.shape().clone()))
    }
}

/// A contiguous copy of the elements in `layout`.
fn owned<S: BackendStorage<Device: BackendDevice<Storage = S>>>(storage: &S, layout: &Layout) -> Result<S> {
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(copy)
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
        self.on_storage([(q, q_layout), (k, k_layout), (v, v_layout)], Storage::Cpu, |storage| match storage {
            Storage::Cpu(held) => Some(held),
            _ => None,
        })
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
        self.on_storage([(q, q_layout), (k, k_layout), (v, v_layout)], Storage::Cuda, |storage| match storage {
            Storage::Cuda(held) => Some(held),
            _ => None,
        })
    }
}

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
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// [`flash_attn`] in which a query sees `window_size_left` keys before and `window_size_right` keys after its position.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    FlashAttn::new(softmax_scale, window_size_left, window_size_right, None, None).run(q, k, v)
}

/// [`flash_attn`] with `alibi_slopes[head] * distance` subtracted from the scores. The slopes are (num_heads), f32.
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
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    FlashAttn::new(softmax_scale, window_size_left, window_size_right, Some(alibi_slopes), None).run(q, k, v)
}

/// [`flash_attn_alibi_windowed`] with scores capped to `softcap * tanh(score / softcap)` before ALiBi. A `softcap` that
/// is not positive has no effect; infinity and NaN are refused.
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
    FlashAttn::new(softmax_scale, window_size_left, window_size_right, alibi_slopes, Some(softcap)).run(q, k, v)
}
