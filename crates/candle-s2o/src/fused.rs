//! What a decoder layer does beside its matrix products and attention, in as few passes over memory as there can be.
//!
//! On a GPU, in bf16 and f16, each function is one kernel that reads and writes every byte once and sums in f32;
//! elsewhere, and for sizes that the kernels do not know, it is the Candle ops that it stands for. Nothing here waits for
//! the device or copies from the host but [`Rotary::new`], and gradients are not supported.

use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Linear, ops, rotary_emb};

#[cfg(feature = "cuda")]
use crate::cuda::fused as gpu;

/// No GPU in this build: nothing is known.
#[cfg(not(feature = "cuda"))]
mod gpu {
    use candle_core::{DType, Device};

    pub(super) fn knows(_: &Device, _: DType) -> bool {
        false
    }
}

/// RMS norm over the last dimension, times `weight`: `x / sqrt(mean(x^2) + eps) * weight`, in the shape and dtype of `x`.
/// f32, f16 or bf16, `weight` `(x's last dimension)` of the same dtype.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if norm_on_gpu(x, None, weight)? {
        return Ok(gpu::rms_norm(&x.contiguous()?, None, weight, eps as f32)?.1);
    }
    ops::rms_norm(&x.contiguous()?, weight, eps as f32)
}

/// The residual stream after `delta` and its RMS norm: `x + delta`, and [`rms_norm`] of that as it is rounded. `delta` is
/// of the shape and dtype of `x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn add_rms_norm(x: Tensor, delta: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if norm_on_gpu(&x, Some(delta), weight)? {
        let (x, delta) = (x.contiguous()?, delta.contiguous()?);
        return match gpu::rms_norm(&x, Some(&delta), weight, eps as f32)? {
            (Some(sum), normed) => Ok((sum, normed)),
            (None, _) => bail!("the kernel left no sum"),
        };
    }
    let sum = (x + delta)?;
    let normed = rms_norm(&sum, weight, eps)?;
    Ok((sum, normed))
}

/// Whether the kernel takes these tensors, which are then of fitting shapes.
#[cfg(feature = "cuda")]
fn norm_on_gpu(x: &Tensor, delta: Option<&Tensor>, weight: &Tensor) -> Result<bool> {
    let width = x.dim(D::Minus1)?;
    if !gpu::knows(x.device(), x.dtype()) || !gpu::knows_norm_width(width) || x.elem_count() == 0 {
        return Ok(false);
    }
    if weight.dims() != [width] || !weight.is_contiguous() {
        bail!("rms norm: expected a weight of [{width}], got {:?}", weight.dims())
    }
    same_kind("rms norm", x, &[Some(weight), delta])?;
    match delta {
        Some(delta) if delta.dims() != x.dims() => bail!("rms norm: expected {:?}, got {:?}", x.dims(), delta.dims()),
        _ => Ok(true),
    }
}

/// Refuses tensors of another dtype or on another device.
#[cfg(feature = "cuda")]
fn same_kind(what: &str, x: &Tensor, others: &[Option<&Tensor>]) -> Result<()> {
    for other in others.iter().flatten() {
        if other.dtype() != x.dtype() || !other.device().same_device(x.device()) {
            let kind = |tensor: &Tensor| format!("{:?} on {:?}", tensor.dtype(), tensor.device().location());
            bail!("{what}: expected tensors of {}, got {}", kind(x), kind(other))
        }
    }
    Ok(())
}

/// Linear layers on one input: one matrix product on a GPU, where the weights lie one above the other. On a CPU they stay
/// apart, because what follows there wants outputs that are contiguous.
#[derive(Debug, Clone)]
pub struct StackedLinear {
    /// One for all, or one each.
    layers: Vec<Linear>,
    sizes: Vec<usize>,
}

impl StackedLinear {
    /// Takes layers `(size, size_in)` of one input; either all have a bias or none has. Where the weights are joined,
    /// both copies are held until this returns.
    ///
    /// # Errors
    /// If there are no layers, only some have a bias, or their input sizes, dtypes or devices differ.
    pub fn new(layers: Vec<Linear>) -> Result<Self> {
        let Some(first) = layers.first().map(Linear::weight) else { bail!("expected at least one linear layer") };
        let sizes = layers.iter().map(|layer| layer.weight().dim(0)).collect::<Result<Vec<_>>>()?;
        if !gpu::knows(first.device(), first.dtype()) {
            return Ok(Self { layers, sizes });
        }
        let weights: Vec<&Tensor> = layers.iter().map(Linear::weight).collect();
        let biases: Vec<&Tensor> = layers.iter().filter_map(Linear::bias).collect();
        let bias = match biases.len() {
            0 => None,
            count if count == layers.len() => Some(Tensor::cat(&biases, 0)?),
            count => bail!("expected biases of all {} layers or of none, got {count}", layers.len()),
        };
        Ok(Self { layers: vec![Linear::new(Tensor::cat(&weights, 0)?, bias)], sizes })
    }

    /// The outputs of all layers for `x` `(.., size_in)`.
    ///
    /// # Errors
    /// As the matrix product.
    pub fn forward(&self, x: &Tensor) -> Result<Stacked> {
        let outputs = self.layers.iter().map(|layer| layer.forward(x)).collect::<Result<_>>()?;
        Ok(Stacked { outputs, sizes: self.sizes.clone() })
    }
}

/// What [`StackedLinear`] computes: the outputs of its layers, side by side or apart.
#[derive(Debug, Clone)]
pub struct Stacked {
    outputs: Vec<Tensor>,
    sizes: Vec<usize>,
}

impl Stacked {
    /// Outputs that are one tensor `(.., sum of sizes)`.
    ///
    /// # Errors
    /// If the sizes do not add up to the last dimension.
    pub fn joined(output: Tensor, sizes: &[usize]) -> Result<Self> {
        if output.dim(D::Minus1)? != sizes.iter().sum::<usize>() {
            bail!("expected a last dimension of {sizes:?} together, got {:?}", output.dims())
        }
        Ok(Self { outputs: vec![output], sizes: sizes.to_vec() })
    }

    /// Each output, contiguous: `(.., size)`.
    ///
    /// # Errors
    /// Candle's, when memory is short.
    pub fn into_parts(self) -> Result<Vec<Tensor>> {
        if self.outputs.len() == self.sizes.len() {
            return Ok(self.outputs);
        }
        let mut start = 0;
        let part = |&size: &usize| {
            start += size;
            self.outputs[0].narrow(D::Minus1, start - size, size)?.contiguous()
        };
        self.sizes.iter().map(part).collect()
    }

    /// Refuses a number of outputs other than `count`.
    fn expect(&self, count: usize) -> Result<()> {
        if self.sizes.len() == count {
            return Ok(());
        }
        bail!("expected {count} stacked outputs, got {}", self.sizes.len())
    }

    /// The one tensor that holds all outputs, if it is where the kernels are.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Option<&Tensor> {
        match self.outputs.as_slice() {
            [joined] if self.sizes.len() > 1 && gpu::knows(joined.device(), joined.dtype()) => Some(joined),
            _ => None,
        }
    }
}

/// `silu(gate) * up` of the stacked outputs gate and up, each `(.., size)`: the inside of a gated MLP.
///
/// # Errors
/// If there are not two outputs of one size.
pub fn silu_mul(gate_up: Stacked) -> Result<Tensor> {
    gate_up.expect(2)?;
    #[cfg(feature = "cuda")]
    if let Some(joined) = gate_up.on_gpu()
        && gate_up.sizes[0] == gate_up.sizes[1]
        && gpu::knows_silu_width(gate_up.sizes[0])
        && joined.elem_count() > 0
    {
        return Ok(gpu::silu_mul(&joined.contiguous()?)?);
    }
    let parts = gate_up.into_parts()?;
    parts[0].silu()? * &parts[1]
}

/// Heads of a layer's queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub num_heads: usize,
    /// Key / value heads.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
}

/// RMS norms of every query and key head, before the rotation (Qwen3).
#[derive(Debug, Clone, Copy)]
pub struct QkNorm<'a> {
    /// `(head_dim)`
    pub q: &'a Tensor,
    /// `(head_dim)`
    pub k: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

/// Rotary embedding of heads: half-split (NeoX), so entry `i` turns with entry `i + head_dim / 2` by the position times
/// inverse frequency `i`.
#[derive(Debug)]
pub struct Rotary {
    inverse_frequencies: Vec<f32>,
    on_device: Tensor,
    factor: f64,
    dtype: DType,
}

/// cos and sin of consecutive positions, from [`Rotary::rows`].
#[derive(Debug, Clone)]
pub struct Rotation {
    /// (2, len, head_dim / 2)
    table: Tensor,
}

impl Rotary {
    /// `head_dim / 2` inverse frequencies, and the factor on cos and sin (1, but for YaRN), for heads of `dtype` on
    /// `device`.
    ///
    /// # Errors
    /// Candle's, when memory is short.
    pub fn new(inverse_frequencies: Vec<f32>, factor: f64, dtype: DType, device: &Device) -> Result<Self> {
        let on_device = Tensor::from_slice(&inverse_frequencies, inverse_frequencies.len(), device)?;
        Ok(Self { inverse_frequencies, on_device, factor, dtype })
    }

    /// cos and sin of positions `start .. start + len`. The angle is the exact product of the position and the f32
    /// frequency: rounded to f32 it would be 0.03 rad off at position 500K.
    ///
    /// # Errors
    /// Candle's, when memory is short.
    pub fn rows(&self, start: usize, len: usize) -> Result<Rotation> {
        let device = self.on_device.device();
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let table = gpu::rotation_table(&self.on_device, self.factor, start, len)?;
            let as_is = gpu::knows(device, self.dtype) && gpu::knows_head_dim(2 * self.inverse_frequencies.len());
            return Ok(Rotation { table: if as_is { table } else { table.to_dtype(self.dtype)? } });
        }
        let entries = len * self.inverse_frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(2 * entries), Vec::with_capacity(entries));
        for position in start..start + len {
            for &frequency in &self.inverse_frequencies {
                let (s, c) = (position as f64 * f64::from(frequency)).sin_cos();
                cos.push((c * self.factor) as f32);
                sin.push((s * self.factor) as f32);
            }
        }
        cos.append(&mut sin);
        let table = Tensor::from_vec(cos, (2, len, self.inverse_frequencies.len()), device)?;
        Ok(Rotation { table: table.to_dtype(self.dtype)? })
    }
}

/// Keys and values of one layer, each `(batch, capacity, num_kv_heads, head_dim)` of contiguous heads.
#[derive(Debug, Clone, Copy)]
pub struct LayerCache<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values, in memory of their own.
    pub v: &'a Tensor,
    /// Where the new positions go; those before are left alone.
    pub start: usize,
}

/// From the stacked outputs q `(batch, len, num_heads * head_dim)`, k and v `(batch, len, num_kv_heads * head_dim)`:
/// normalises q and k per head if `norm` is there, rotates both by `rotation` (of `len` positions), writes k and v into
/// rows `start .. start + len` of the cache, and returns q, contiguous `(batch, len, num_heads, head_dim)`.
///
/// # Errors
/// If there are not three outputs, or shapes, dtypes or devices do not fit.
pub fn rotate_into_cache(
    qkv: Stacked,
    heads: Heads,
    norm: Option<QkNorm>,
    rotation: &Rotation,
    cache: LayerCache,
) -> Result<Tensor> {
    qkv.expect(3)?;
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    #[cfg(feature = "cuda")]
    if let Some(joined) = qkv.on_gpu()
        && gpu::knows_head_dim(head_dim)
        && joined.elem_count() > 0
    {
        check_rotation(joined, heads, norm, rotation, cache)?;
        let caches = (cache.k, cache.v);
        return Ok(gpu::rotate(&joined.contiguous()?, heads, norm, &rotation.table, caches, cache.start)?);
    }
    let parts = qkv.into_parts()?;
    let per_head = |x: &Tensor, heads: usize| {
        let (batch, len, _) = x.dims3()?;
        x.reshape((batch, len, heads, head_dim))
    };
    let (q, k, v) =
        (per_head(&parts[0], num_heads)?, per_head(&parts[1], num_kv_heads)?, per_head(&parts[2], num_kv_heads)?);
    let (q, k) = match norm {
        Some(norm) => (rms_norm(&q, norm.q, norm.eps)?, rms_norm(&k, norm.k, norm.eps)?),
        None => (q, k),
    };
    let (cos, sin) = (rotation.table.get(0)?.to_dtype(q.dtype())?, rotation.table.get(1)?.to_dtype(q.dtype())?);
    let turn = |x: &Tensor| rotary_emb::rope_thd(&x.contiguous()?, &cos, &sin);
    let (q, k) = (turn(&q)?, turn(&k)?);
    cache.k.slice_set(&k, 1, cache.start)?;
    cache.v.slice_set(&v.contiguous()?, 1, cache.start)?;
    Ok(q)
}

/// What the kernel takes on trust.
#[cfg(feature = "cuda")]
fn check_rotation(
    qkv: &Tensor,
    Heads { num_heads, num_kv_heads, head_dim }: Heads,
    norm: Option<QkNorm>,
    rotation: &Rotation,
    cache: LayerCache,
) -> Result<()> {
    let (batch, len, width) = qkv.dims3()?;
    let refuse = |what: &str, expected: &[usize], got: &Tensor| -> Result<()> {
        bail!("{what}: expected {expected:?}, got {:?} {:?}", got.dims(), got.dtype())
    };
    if width != (num_heads + 2 * num_kv_heads) * head_dim {
        refuse("stacked q, k and v", &[batch, len, (num_heads + 2 * num_kv_heads) * head_dim], qkv)?;
    }
    let table = &rotation.table;
    if table.dims() != [2, len, head_dim / 2] || table.dtype() != DType::F32 {
        refuse("rotation", &[2, len, head_dim / 2], table)?;
    }
    let norms = norm.map(|norm| [norm.q, norm.k]);
    for norm in norms.iter().flatten() {
        if norm.dims() != [head_dim] {
            refuse("norm of q or k", &[head_dim], norm)?;
        }
    }
    for side in [cache.k, cache.v] {
        let room = side.dims4().is_ok_and(|dims| {
            (dims.0, dims.2, dims.3) == (batch, num_kv_heads, head_dim) && cache.start + len <= dims.1
        });
        if !room {
            refuse("cache", &[batch, cache.start + len, num_kv_heads, head_dim], side)?;
        }
    }
    let [q_norm, k_norm] = norms.map_or([None; 2], |norms| norms.map(Some));
    // Both sides are locked for writing while the others are read: shared memory would lock for good.
    let memory = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    let mut others = [Some(cache.k), Some(qkv), Some(table), q_norm, k_norm].into_iter().flatten();
    if others.any(|other| memory(other) == memory(cache.v)) || memory(qkv) == memory(cache.k) {
        bail!("cache: expected keys and values in memory of their own, got memory shared with another operand")
    }
    same_kind("rotation", qkv, &[q_norm, k_norm, Some(cache.k), Some(cache.v)])?;
    if !table.device().same_device(qkv.device()) {
        refuse("rotation on the device of q, k and v", &[2, len, head_dim / 2], table)?;
    }
    Ok(())
}
