//! Keys and values of all layers, allocated once and written in place.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::fused::LayerCache;

/// A KV cache for a fixed batch and a fixed number of positions.
///
/// Keys and values of a layer are `(batch, capacity, num_kv_heads, head_dim)`, the layout in which attention reads
/// them, so a chunk is one copy into place and a view of the first positions needs no copy. It is not `Clone`, because
/// clones would share the memory that prefill writes; [`Self::sequences`] shares it on purpose.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    num_kv_heads: usize,
    batch: usize,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// Allocates a cache of `capacity` positions for `batch` sequences.
    ///
    /// # Errors
    /// [`ModelError::ContextTooLong`] if the model has fewer positions, [`ModelError::OutOfMemory`] if a GPU has too
    /// little free memory.
    pub fn new(config: &DecoderConfig, batch: usize, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        if capacity > config.max_positions {
            return Err(ModelError::ContextTooLong { expected: config.max_positions, got: capacity });
        }
        if batch == 0 || capacity == 0 {
            let got = format!("{batch} and {capacity}");
            return Err(ModelError::input("batch and capacity of a KV cache", "at least 1 each", got));
        }
        let shape = (batch, capacity, config.num_kv_heads, config.head_dim);
        let need = Need {
            what: "a KV cache",
            bytes: Self::bytes(config, batch, capacity, dtype),
            way_out: "take a shorter prompt, a smaller batch, or bf16 or f16 instead of f32",
        };
        // Checked before any layer is allocated.
        if let Some(memory) = DeviceMemory::of(device)?.filter(|memory| memory.free < need.bytes) {
            return Err(need.unmet(memory));
        }
        let side = || Tensor::zeros(shape, dtype, device);
        let layers = (0..config.num_layers).map(|_| Ok((side()?, side()?))).collect::<Result<_>>();
        let num_kv_heads = config.num_kv_heads;
        Ok(Self { layers: need.check(layers, device)?, num_kv_heads, batch, capacity, len: 0 })
    }

    /// The memory of a cache, in bytes.
    pub fn bytes(config: &DecoderConfig, batch: usize, capacity: usize, dtype: DType) -> u64 {
        let elements = [2 * config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim];
        elements.into_iter().fold(dtype.size_in_bytes() as u64, |n, m| n.saturating_mul(m as u64))
    }

    /// A cache of some of the sequences in the same memory, for sequences that are prefilled one by one and decoded
    /// together. It has this cache's length; later the lengths change separately ([`Self::set_len`]).
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] if a sequence does not exist or the range is empty.
    pub fn sequences(&self, range: Range<usize>) -> Result<Self> {
        if range.is_empty() || range.end > self.batch {
            let expected = format!("a part of 0..{}", self.batch);
            return Err(ModelError::input("sequences of the KV cache", expected, format!("{range:?}")));
        }
        let some = |side: &Tensor| side.narrow(0, range.start, range.len());
        let layers = self.layers.iter().map(|(k, v)| Ok((some(k)?, some(v)?))).collect::<Result<_>>()?;
        Ok(Self { layers, batch: range.len(), ..*self })
    }

    /// Number of filled positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Empties the cache; the memory stays allocated.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Keeps the first `len` positions (all if there are fewer), so that a common prefix is not computed again.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Counts the first `len` positions as filled, after they were written through [`Self::sequences`]. Positions that
    /// were never written hold zeros.
    ///
    /// # Errors
    /// [`ModelError::CacheFull`] beyond the capacity.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity {
            return Err(ModelError::CacheFull { expected: self.capacity, got: len });
        }
        self.len = len;
        Ok(())
    }

    /// The filled keys and values of a layer, each a view `(batch, len, num_kv_heads, head_dim)`.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] if the layer does not exist.
    pub fn layer(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        if layer >= self.layers.len() {
            let expected = format!("less than {}", self.layers.len());
            return Err(ModelError::input("layer of the KV cache", expected, layer));
        }
        self.with_new(layer, 0)
    }

    /// Checks the logits of a prefill or of decoding into this cache. The host waits for their sum.
    ///
    /// # Errors
    /// [`ModelError::NotFinite`] if one is NaN or infinite, with the layer where such values begin.
    pub fn check_logits(&self, logits: &Tensor) -> Result<()> {
        let got = logits.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        if got.is_finite() { Ok(()) } else { Err(ModelError::NotFinite { got, layer: self.first_not_finite()? }) }
    }

    fn first_not_finite(&self) -> Result<Option<usize>> {
        let is_finite = |side: &Tensor| -> Result<bool> {
            Ok(side.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?.is_finite())
        };
        for layer in 0..self.layers.len() {
            let (k, v) = self.layer(layer)?;
            if !(is_finite(&k)? && is_finite(&v)?) {
                return Ok(Some(layer));
            }
        }
        Ok(None)
    }

    /// Refuses `count` more positions if they do not fit.
    pub(crate) fn check_room(&self, count: usize) -> Result<()> {
        let got = self.len.saturating_add(count);
        if got > self.capacity {
            return Err(ModelError::CacheFull { expected: self.capacity, got });
        }
        Ok(())
    }

    /// A layer's memory, where new keys and values are written after the filled positions. The length changes only with
    /// [`Self::advance`], after the last layer.
    pub(crate) fn end_of(&mut self, layer: usize) -> LayerCache<'_> {
        let (k, v) = &self.layers[layer];
        LayerCache { k, v, start: self.len }
    }

    /// Views of a layer's keys and values, including `count` positions that were written and are not yet counted.
    pub(crate) fn with_new(&self, layer: usize, count: usize) -> Result<(Tensor, Tensor)> {
        let (k, v) = &self.layers[layer];
        Ok((k.narrow(1, 0, self.len + count)?, v.narrow(1, 0, self.len + count)?))
    }

    pub(crate) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    pub(crate) fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }
}
