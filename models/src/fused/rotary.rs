//! Rotary embedding, and the step from the projections of a layer to its queries and cache.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::rotary_emb;

use super::norm::rms_norm;
use super::stacked::Stacked;
#[cfg(feature = "cuda")]
use {
    super::{cuda, same_kind, supports, supports_head_dim},
    candle_core::bail,
};

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
    /// Weight of the query norm, `(head_dim)`.
    pub q: &'a Tensor,
    /// Weight of the key norm, `(head_dim)`.
    pub k: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

/// Half-split (NeoX) rotary embedding of heads: entries `i` and `i + head_dim / 2` rotate together, by the position
/// times inverse frequency `i`.
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
    /// Takes `head_dim / 2` inverse frequencies and the factor on cos and sin (1 except for YaRN), for heads of
    /// `dtype` on `device`.
    ///
    /// # Errors
    /// Candle's error if memory runs out.
    pub fn new(inverse_frequencies: Vec<f32>, factor: f64, dtype: DType, device: &Device) -> Result<Self> {
        let on_device = Tensor::from_slice(&inverse_frequencies, inverse_frequencies.len(), device)?;
        Ok(Self { inverse_frequencies, on_device, factor, dtype })
    }

    /// cos and sin of positions `start .. start + len`. The angle is the exact product of the position and the f32
    /// frequency: rounded to f32 it would be 0.03 rad off at position 500K.
    ///
    /// # Errors
    /// Candle's error if memory runs out.
    pub fn rows(&self, start: usize, len: usize) -> Result<Rotation> {
        let device = self.on_device.device();
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let table = cuda::rotation_table(&self.on_device, self.factor, start, len)?;
            let as_is = supports(device, self.dtype) && supports_head_dim(2 * self.inverse_frequencies.len());
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
    /// Values, in separate memory.
    pub v: &'a Tensor,
    /// First new position; earlier positions are not changed.
    pub start: usize,
}

/// From the stacked outputs q `(batch, len, num_heads * head_dim)`, k and v `(batch, len, num_kv_heads * head_dim)`:
/// normalises q and k per head if `norm` is given, rotates both by `rotation` (of `len` positions), writes k and v into
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
        && supports_head_dim(head_dim)
        && joined.elem_count() > 0
    {
        check_rotation(joined, heads, norm, rotation, cache)?;
        let caches = (cache.k, cache.v);
        return Ok(cuda::rotate(&joined.contiguous()?, heads, norm, &rotation.table, caches, cache.start)?);
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

/// Checks the requirements of the kernel, which has no checks.
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
    // Both sides are locked for writing while the others are read, so shared memory would deadlock.
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
