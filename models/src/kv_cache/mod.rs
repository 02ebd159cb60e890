//! Keys and values of all layers, allocated once and written in place.

#[cfg(feature = "cuda")]
mod host;

use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::fused::{Int8Rows, LayerCache};
#[cfg(feature = "cuda")]
use host::HostLayers;

/// Precision and place of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvStorage {
    /// On the device, as keys and values are computed.
    #[default]
    AsComputed,
    /// 8-bit integers with an f32 scale for each row of a head: half of the memory of 16 bits, plus one layer in the
    /// dtype of the keys and values, into which each layer is read in turn. Attention reads only what was stored, also
    /// of the chunk at hand, so that results do not depend on chunks.
    Int8,
    /// In pinned memory of the host, for a prompt whose cache a GPU cannot hold; the GPU has the rows of two layers. A
    /// prefill copies while it computes, and reads the rows of earlier chunks once for every chunk, so large chunks are
    /// faster. Every decoded token reads the whole cache over PCIe. Only for one sequence.
    Host,
}

/// A KV cache for a fixed batch and a fixed number of positions.
///
/// Keys and values of a layer are `(batch, capacity, num_kv_heads, head_dim)`, the layout in which attention reads
/// them, so a chunk is one copy into place and a view of the first positions needs no copy. It is not `Clone`, because
/// clones would share the memory that prefill writes; [`Self::sequences`] shares it on purpose.
#[derive(Debug)]
pub struct KvCache {
    layers: Layers,
    num_kv_heads: usize,
    batch: usize,
    capacity: usize,
    len: usize,
}

/// Keys and values of every layer.
#[derive(Debug)]
enum Layers {
    AsComputed(Vec<[Tensor; 2]>),
    Int8 {
        layers: Vec<[Int8Rows; 2]>,
        /// The keys and values of the layer at hand, as they are stored.
        opened: [Tensor; 2],
    },
    #[cfg(feature = "cuda")]
    Host(Arc<HostLayers>),
}

impl KvCache {
    /// Allocates a cache of `capacity` positions for `batch` sequences, whose keys and values have `dtype`.
    ///
    /// # Errors
    /// [`ModelError::ContextTooLong`] if the model has fewer positions, [`ModelError::OutOfMemory`] if a GPU has too
    /// little free memory.
    pub fn new(
        config: &DecoderConfig,
        batch: usize,
        capacity: usize,
        dtype: DType,
        storage: KvStorage,
        device: &Device,
    ) -> Result<Self> {
        if capacity > config.max_positions {
            return Err(ModelError::ContextTooLong { expected: config.max_positions, got: capacity });
        }
        if batch == 0 || capacity == 0 {
            let got = format!("{batch} and {capacity}");
            return Err(ModelError::input("batch and capacity of a KV cache", "at least 1 each", got));
        }
        let shape = (batch, capacity, config.num_kv_heads, config.head_dim);
        if storage == KvStorage::Host && !device.is_cuda() {
            return Err(ModelError::input("device of a KV cache in host memory", "an NVIDIA GPU", "the CPU"));
        }
        let need = Need {
            what: "a KV cache",
            bytes: Self::bytes(config, batch, capacity, dtype, storage),
            way_out: "take a shorter prompt, a smaller batch, bf16 or f16 instead of f32, 8 bits (--kv 8bit), or memory of \
                      the host (--kv host)",
        };
        // Checked before any layer is allocated.
        if let Some(memory) = DeviceMemory::of(device)?.filter(|memory| memory.free < need.bytes) {
            return Err(need.unmet(memory));
        }
        let sides = || -> candle_core::Result<_> {
            Ok([Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?])
        };
        let int8 = || Ok([Int8Rows::zeros(shape, device)?, Int8Rows::zeros(shape, device)?]);
        let of_layers = 0..config.num_layers;
        let layers = || -> Result<_> {
            Ok(match storage {
                KvStorage::AsComputed => {
                    Layers::AsComputed(of_layers.map(|_| sides()).collect::<candle_core::Result<_>>()?)
                }
                KvStorage::Int8 => Layers::Int8 {
                    layers: of_layers.map(|_| int8()).collect::<candle_core::Result<_>>()?,
                    opened: sides()?,
                },
                #[cfg(feature = "cuda")]
                KvStorage::Host => {
                    let of_host = Need {
                        what: "a KV cache in host memory",
                        bytes: Self::bytes(config, batch, capacity, dtype, KvStorage::AsComputed),
                        way_out: "take a shorter prompt, or 8 bits on the GPU (--kv 8bit)",
                    };
                    Layers::Host(Arc::new(HostLayers::new(config.num_layers, shape, dtype, device, of_host)?))
                }
                #[cfg(not(feature = "cuda"))]
                KvStorage::Host => unreachable!("only GPUs are accepted above"),
            })
        };
        let layers = need.check(layers(), device)?;
        Ok(Self { layers, num_kv_heads: config.num_kv_heads, batch, capacity, len: 0 })
    }

    /// The memory of a cache on its device, in bytes.
    pub fn bytes(config: &DecoderConfig, batch: usize, capacity: usize, dtype: DType, storage: KvStorage) -> u64 {
        let row = config.head_dim.saturating_mul(dtype.size_in_bytes());
        let row = match storage {
            KvStorage::AsComputed => row.saturating_mul(config.num_layers),
            KvStorage::Host => row.saturating_mul(2),
            KvStorage::Int8 => {
                row.saturating_add(config.num_layers.saturating_mul(Int8Rows::row_bytes(config.head_dim)))
            }
        };
        [batch, capacity, config.num_kv_heads, row].into_iter().fold(2, |n, m| n.saturating_mul(m as u64))
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
        let some = |[k, v]: &[Tensor; 2]| -> candle_core::Result<_> {
            Ok([k.narrow(0, range.start, range.len())?, v.narrow(0, range.start, range.len())?])
        };
        let layers = match &self.layers {
            Layers::AsComputed(layers) => {
                Layers::AsComputed(layers.iter().map(some).collect::<candle_core::Result<_>>()?)
            }
            Layers::Int8 { layers, opened } => {
                let some_rows = |[k, v]: &[Int8Rows; 2]| Ok([k.sequences(&range)?, v.sequences(&range)?]);
                let layers = layers.iter().map(some_rows).collect::<candle_core::Result<_>>()?;
                Layers::Int8 { layers, opened: some(opened)? }
            }
            #[cfg(feature = "cuda")]
            Layers::Host(layers) => Layers::Host(Arc::clone(layers)),
        };
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
        self.truncate(0);
    }

    /// Keeps the first `len` positions (all if there are fewer), so that a common prefix is not computed again.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        #[cfg(feature = "cuda")]
        if let Layers::Host(layers) = &self.layers {
            layers.truncate(self.len);
        }
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

    /// The filled keys and values of a layer, each `(batch, len, num_kv_heads, head_dim)`: views, or copies of a cache in
    /// 8 bits or in host memory.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] if the layer does not exist.
    pub fn layer(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        if layer >= self.num_layers() {
            let expected = format!("less than {}", self.num_layers());
            return Err(ModelError::input("layer of the KV cache", expected, layer));
        }
        let (k, v) = self.with_new(layer, 0)?;
        match self.layers {
            Layers::AsComputed(_) => Ok((k, v)),
            _ => Ok((k.copy()?, v.copy()?)),
        }
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
        for layer in 0..self.num_layers() {
            let (k, v) = self.with_new(layer, 0)?;
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

    /// Lets `write` write the keys and values of new positions of a layer, after the filled ones. It returns the queries
    /// `(batch, new positions, num_heads, head_dim)`. The length changes only with [`Self::advance`], after the last layer.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        write: impl FnOnce(LayerCache) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let [k, v] = match &self.layers {
            Layers::AsComputed(layers) => &layers[layer],
            Layers::Int8 { opened, .. } => opened,
            #[cfg(feature = "cuda")]
            Layers::Host(layers) => return Ok(layers.write(layer, self.len, write)?),
        };
        let q = write(LayerCache { k, v, start: self.len })?;
        if let Some([k_int8, v_int8]) = self.int8(layer) {
            let new = self.len..self.len + q.dim(1)?;
            k_int8.store(k, new.clone())?;
            v_int8.store(v, new)?;
        }
        Ok(q)
    }

    /// Views of a layer's keys and values, including `count` positions that were written and are not yet counted. Those
    /// of a cache in 8 bits or in host memory hold until the next layer is written or viewed.
    pub(crate) fn with_new(&self, layer: usize, count: usize) -> Result<(Tensor, Tensor)> {
        let [k, v] = match &self.layers {
            Layers::AsComputed(layers) => &layers[layer],
            Layers::Int8 { layers, opened } => {
                for (rows, side) in layers[layer].iter().zip(opened) {
                    rows.load(side, 0..self.len)?;
                }
                opened
            }
            #[cfg(feature = "cuda")]
            Layers::Host(layers) => layers.layer(layer, self.len)?,
        };
        Ok((k.narrow(1, 0, self.len + count)?, v.narrow(1, 0, self.len + count)?))
    }

    /// The keys and values of a layer of a cache in 8 bits.
    pub(crate) fn int8(&self, layer: usize) -> Option<&[Int8Rows; 2]> {
        match &self.layers {
            Layers::Int8 { layers, .. } => Some(&layers[layer]),
            _ => None,
        }
    }

    pub(crate) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    pub(crate) fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    pub(crate) fn num_layers(&self) -> usize {
        match &self.layers {
            Layers::AsComputed(layers) => layers.len(),
            Layers::Int8 { layers, .. } => layers.len(),
            #[cfg(feature = "cuda")]
            Layers::Host(layers) => layers.num_layers(),
        }
    }
}
