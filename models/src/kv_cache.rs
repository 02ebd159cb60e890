//! Keys and values of all layers, allocated once and written in place.

use candle_core::{DType, Device, Tensor};

use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};

/// A KV cache for a fixed batch and a fixed number of positions.
///
/// Keys and values of a layer are `(batch, capacity, num_kv_heads, head_dim)`: the layout in which attention reads
/// them, so a chunk is one copy into place and a view of the first positions costs nothing. It is not `Clone`, because
/// clones would share the memory that prefill writes.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    batch: usize,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// Allocates a cache of `capacity` positions for `batch` sequences.
    ///
    /// # Errors
    /// [`ModelError::ContextTooLong`] when the model has fewer positions; Candle's errors when memory is short.
    pub fn new(config: &DecoderConfig, batch: usize, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        if capacity > config.max_positions {
            return Err(ModelError::ContextTooLong { expected: config.max_positions, got: capacity });
        }
        if batch == 0 || capacity == 0 {
            return Err(ModelError::WrongInput {
                what: "batch and capacity of a KV cache",
                expected: "at least 1 each".to_owned(),
                got: format!("{batch} and {capacity}"),
            });
        }
        let shape = (batch, capacity, config.num_kv_heads, config.head_dim);
        let layers = (0..config.num_layers)
            .map(|_| Ok((Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?)))
            .collect::<Result<_>>()?;
        Ok(Self { layers, batch, capacity, len: 0 })
    }

    /// Positions that are filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sequences that it holds.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Forgets everything; the memory stays.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Keeps the first `len` positions, so that a common prefix need not be computed again. Longer than the current
    /// length keeps all.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The filled keys and values of a layer, each a view `(batch, len, num_kv_heads, head_dim)`.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] when there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        let (k, v) = self.layers.get(layer).ok_or_else(|| ModelError::WrongInput {
            what: "layer of the KV cache",
            expected: format!("less than {}", self.layers.len()),
            got: layer.to_string(),
        })?;
        Ok((k.narrow(1, 0, self.len)?, v.narrow(1, 0, self.len)?))
    }

    /// Refuses `count` more positions when they do not fit.
    pub(crate) fn check_room(&self, count: usize) -> Result<()> {
        let got = self.len.saturating_add(count);
        if got > self.capacity {
            return Err(ModelError::CacheFull { expected: self.capacity, got });
        }
        Ok(())
    }

    /// Writes a layer's new keys and values behind the filled ones and returns views that include them. The length
    /// changes only with [`Self::advance`], after the last layer.
    pub(crate) fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (k_all, v_all) = &self.layers[layer];
        let k_len = self.len + k.dim(1)?;
        k_all.slice_set(&k.contiguous()?, 1, self.len)?;
        v_all.slice_set(&v.contiguous()?, 1, self.len)?;
        Ok((k_all.narrow(1, 0, k_len)?, v_all.narrow(1, 0, k_len)?))
    }

    pub(crate) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }
}
