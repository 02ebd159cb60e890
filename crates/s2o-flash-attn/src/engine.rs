//! Chooses the implementation for a call: S2O, dense attention, or the plain loop.

use candle_core::{D, DType, Tensor};
use candle_s2o::{AttnError, Mask, S2oError, S2oOp, ShapeError, dense_attn, dense_attn_with_softcap};
#[cfg(feature = "cuda")]
use s2o_cuda::Launcher;
#[cfg(feature = "cuda")]
use s2o_kernels::{Dtype, Function, HeadDim, Kernel};

use crate::error::FlashAttnError;
#[cfg(feature = "cuda")]
use crate::kernel::{self, KernelCall};
use crate::mask::{Reach, Window};
use crate::plain::{self, Scores};
use crate::s2o::{self, Policy};

/// Head dims of the CUDA kernels of S2O. Smaller heads are padded with zeros, which changes neither scores nor outputs.
const CUDA_HEAD_DIMS: [usize; 3] = [64, 128, 256];
/// Largest head dim of the kernels for exact calls that are faster than [`KernelCall`]'s. Most need 64 or this size; the
/// one for a single query takes every multiple of 8 up to it.
const MOST_OF_EXACT: usize = 128;

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
    /// Scores become `softcap * tanh(score / softcap)`. A value that is not positive has no effect.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    pub(crate) fn new(
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        alibi_slopes: Option<&Tensor>,
        softcap: Option<f32>,
    ) -> Self {
        Self { softmax_scale, alibi_slopes: alibi_slopes.cloned(), window_size_left, window_size_right, softcap }
    }

    /// The window for keys of at most this length.
    pub(crate) fn window(&self, max_k_len: usize) -> Window {
        Window::new(self.window_size_left, self.window_size_right, max_k_len)
    }
}

/// One attention call, without its tensors.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) op: &'a FlashAttn,
    pub(crate) window: Window,
    pub(crate) ranges: Vec<(i64, i64)>,
    /// Whether the policy may make the call sparse.
    pub(crate) may_skip: bool,
}

/// The options of a call, checked.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    pub(crate) slopes: Option<&'a Tensor>,
    pub(crate) softcap: Option<f32>,
}

/// Checks the tensors and the options of a call.
pub(crate) fn checked<'a>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    op: &'a FlashAttn,
) -> Result<Checked<'a>, FlashAttnError> {
    check(q, k, v)?;
    if !op.softmax_scale.is_finite() {
        return Err(AttnError::from(S2oError::SoftmaxScale { got: op.softmax_scale }).into());
    }
    let slopes = op.alibi_slopes.as_ref().map(|slopes| check_slopes(slopes, q)).transpose()?;
    // As in FlashAttention, a value that is not positive has no effect.
    let softcap = op.softcap.filter(|&cap| cap.is_nan() || cap > 0.0);
    match softcap.filter(|cap| !cap.is_finite()) {
        Some(got) => Err(FlashAttnError::Softcap { got }),
        None => Ok(Checked { slopes, softcap }),
    }
}

/// Computes `call` on `q` (batch, q_len, num_heads, head_dim), `k` and `v` (batch, k_len, num_kv_heads, head_dim).
pub(crate) fn dispatch(q: &Tensor, k: &Tensor, v: &Tensor, call: &Call<'_>) -> Result<Tensor, FlashAttnError> {
    let Checked { slopes, softcap } = checked(q, k, v, call.op)?;
    let softmax_scale = call.op.softmax_scale;
    if q.elem_count() == 0 || k.elem_count() == 0 {
        return Ok(q.zeros_like()?);
    }
    let (q_len, k_len) = (q.dims()[1], k.dims()[1]);
    let reach = call.window.reach(q_len, k_len);
    let ranges = if reach == Reach::Full { Vec::new() } else { call.ranges.clone() };
    let is_plain = slopes.is_none() && ranges.is_empty() && reach != Reach::Local;
    let has_fast_path = is_plain && has_fast_path(q)?;
    if has_fast_path && call.may_skip && q_len == 1 {
        s2o::single_query()?;
    }
    if has_fast_path && q_len == 1 && softcap.is_none() && takes_single_query(q) {
        return exact([q, k, v], softmax_scale, softcap, Mask::Full);
    }
    if has_fast_path && (is_fast_if_exact(q, softcap) || reach == Reach::Causal && may_be_sparse(q, k_len, call)?) {
        return padded(q, k, v, |q, k, v| match reach {
            Reach::Causal => causal([q, k, v], softcap, call),
            _ => full([q, k, v], softcap, softmax_scale),
        });
    }
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return KernelCall { qkv: [q, k, v], softmax_scale, window: call.window, slopes, softcap, sequences: None }
            .run();
    }
    let slopes = slopes.map(|slopes| slopes.to_vec1()).transpose()?;
    let scores = Scores { softmax_scale, window: call.window, slopes, softcap, ranges };
    Ok(plain::compute(q, k, v, &scores)?)
}

/// Every query sees every key. Queries are independent, so more queries than keys are computed in parts.
fn full([q, k, v]: [&Tensor; 3], softcap: Option<f32>, softmax_scale: f32) -> Result<Tensor, FlashAttnError> {
    let (q_len, k_len) = (q.dims()[1], k.dims()[1]);
    let parts = (0..q_len).step_by(k_len).map(|start| {
        let part = q.narrow(1, start, k_len.min(q_len - start))?;
        exact([&part, k, v], softmax_scale, softcap, Mask::Full)
    });
    joined(parts.collect::<Result<Vec<_>, FlashAttnError>>()?)
}

/// Causal attention. Queries before the first key see nothing.
fn causal([q, k, v]: [&Tensor; 3], softcap: Option<f32>, call: &Call<'_>) -> Result<Tensor, FlashAttnError> {
    let (q_len, k_len) = (q.dims()[1], k.dims()[1]);
    if q_len > k_len {
        let blind = q.narrow(1, 0, q_len - k_len)?.zeros_like()?;
        let seeing = causal([&q.narrow(1, q_len - k_len, k_len)?, k, v], softcap, call)?;
        return joined(vec![blind, seeing]);
    }
    let softmax_scale = call.op.softmax_scale;
    let op = |config| {
        let op = S2oOp::new(softmax_scale, config);
        match softcap {
            Some(softcap) => op.with_softcap(softcap),
            None => op,
        }
    };
    match if call.may_skip { s2o::policy()? } else { Policy::Dense } {
        Policy::Dense => exact([q, k, v], softmax_scale, softcap, Mask::Causal),
        Policy::S2o(config) => s2o::apply(op(config), q, k, v),
        Policy::Layers { base, settings } => {
            let config = s2o::next_layer(&base, &settings, [q.dims()[0], q_len, k_len])?;
            // This error ends the model's forward pass, so the next call begins another pass.
            s2o::apply(op(config), q, k, v).inspect_err(|_| s2o::begin_prompt())
        }
    }
}

fn exact(
    [q, k, v]: [&Tensor; 3],
    softmax_scale: f32,
    softcap: Option<f32>,
    mask: Mask,
) -> Result<Tensor, FlashAttnError> {
    Ok(match softcap {
        Some(softcap) => dense_attn_with_softcap(q, k, v, softmax_scale, softcap, mask)?,
        None => dense_attn(q, k, v, softmax_scale, mask)?,
    })
}

fn joined(mut parts: Vec<Tensor>) -> Result<Tensor, FlashAttnError> {
    match parts.len() {
        1 => Ok(parts.remove(0)),
        _ => Ok(Tensor::cat(&parts, 1)?),
    }
}

/// Whether the implementation of full and causal attention that S2O shares takes the tensors.
pub(crate) fn has_fast_path(q: &Tensor) -> Result<bool, FlashAttnError> {
    match q.dims().last().copied().unwrap_or_default() {
        head_dim if q.device().is_cpu() => Ok(head_dim.is_multiple_of(8) && head_dim <= 256),
        head_dim if head_dim <= MOST_OF_EXACT => Ok(true),
        head_dim => Ok(CUDA_HEAD_DIMS.iter().any(|&wide| head_dim <= wide) && has_wide_kernels(q)?),
    }
}

/// Whether the GPU has the shared memory that the kernels for a head_dim of 256 need.
fn has_wide_kernels(q: &Tensor) -> Result<bool, FlashAttnError> {
    #[cfg(feature = "cuda")]
    {
        let of_s2o = Function::new(Kernel::SinglePass, Dtype::Bf16, HeadDim::D256);
        Launcher::of(q).and_then(|launcher| launcher.fits(of_s2o)).map_err(kernel::cuda)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = q;
        Ok(false)
    }
}

/// Whether an exact call is at least as fast in that implementation as in [`KernelCall`].
fn is_fast_if_exact(q: &Tensor, softcap: Option<f32>) -> bool {
    let head_dim = q.dims().last().copied().unwrap_or_default();
    // Odd sizes, which no kernel takes, are padded.
    let is_fast = head_dim <= MOST_OF_EXACT && (CUDA_HEAD_DIMS.contains(&head_dim) || !head_dim.is_multiple_of(8));
    q.device().is_cpu() || is_fast && softcap.is_none()
}

/// Whether the kernel for a single query without softcap takes the heads as they are.
fn takes_single_query(q: &Tensor) -> bool {
    let head_dim = q.dims().last().copied().unwrap_or_default();
    q.device().is_cuda() && head_dim.is_multiple_of(8) && head_dim <= MOST_OF_EXACT
}

fn may_be_sparse(q: &Tensor, k_len: usize, call: &Call<'_>) -> Result<bool, FlashAttnError> {
    if !call.may_skip || q.dims()[1] == 1 {
        return Ok(false);
    }
    Ok(s2o::sparse_from(q, 1)?.is_some_and(|from| k_len >= from))
}

fn padded(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    run: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor, FlashAttnError>,
) -> Result<Tensor, FlashAttnError> {
    let head_dim = q.dims()[3];
    match CUDA_HEAD_DIMS.into_iter().find(|&wide| head_dim <= wide) {
        Some(wide) if q.device().is_cuda() && head_dim < wide => {
            let out = run(&resized(q, wide)?, &resized(k, wide)?, &resized(v, wide)?)?;
            resized(&out, head_dim)
        }
        _ => run(q, k, v),
    }
}

/// A copy with heads of `head_dim` columns: the first ones, or all and zeros after them.
fn resized(x: &Tensor, head_dim: usize) -> Result<Tensor, FlashAttnError> {
    let from = x.dims()[3];
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && from.is_multiple_of(8) && head_dim.is_multiple_of(8) {
        return crate::resize::resized(x, head_dim);
    }
    Ok(match head_dim > from {
        true => x.pad_with_zeros(D::Minus1, 0, head_dim - from)?,
        false => x.narrow(D::Minus1, 0, head_dim)?.contiguous()?,
    })
}

/// The CPU path reads slopes on any device.
fn check_slopes<'a>(slopes: &'a Tensor, q: &Tensor) -> Result<&'a Tensor, FlashAttnError> {
    let (name, num_heads) = ("alibi_slopes", q.dims()[2]);
    if q.device().is_cuda() && !slopes.device().same_device(q.device()) {
        let [expected, got] = [q, slopes].map(|tensor| tensor.device().location());
        return Err(AttnError::DeviceMismatch { name, expected, got }.into());
    }
    if slopes.dtype() != DType::F32 {
        return Err(FlashAttnError::DType { name, expected: "F32", got: slopes.dtype() });
    }
    if slopes.dims() != [num_heads] {
        return Err(FlashAttnError::dims(name, format!("[{num_heads}]"), slopes));
    }
    Ok(slopes)
}

/// The checks that all implementations need. More queries than keys and any positive head_dim are allowed.
fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(), AttnError> {
    let mut dims = [[0; 4]; 3];
    for ((name, tensor), dims) in [("q", q), ("k", k), ("v", v)].into_iter().zip(&mut dims) {
        *dims = tensor.dims().try_into().map_err(|_| AttnError::Rank { name, got: tensor.dims().to_vec() })?;
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(AttnError::DType { name, got: tensor.dtype() });
        }
        if tensor.dtype() != q.dtype() {
            return Err(AttnError::DTypeMismatch { name, expected: q.dtype(), got: tensor.dtype() });
        }
        if !tensor.device().same_device(q.device()) {
            let [expected, got] = [q, tensor].map(|tensor| tensor.device().location());
            return Err(AttnError::DeviceMismatch { name, expected, got });
        }
    }
    let [[batch, _, num_heads, head_dim], [_, k_len, num_kv_heads, _], _] = dims;
    for (name, got) in [("k", dims[1]), ("v", dims[2])] {
        let expected = [batch, k_len, num_kv_heads, head_dim];
        if got != expected {
            return Err(S2oError::from(ShapeError::Mismatch { name, expected, got }).into());
        }
    }
    for (name, size) in [("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)] {
        if size == 0 {
            return Err(S2oError::from(ShapeError::Empty { name }).into());
        }
    }
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(S2oError::from(ShapeError::Heads { num_heads, num_kv_heads }).into());
    }
    Ok(())
}
