//! Keys and values of all layers in memory of the host, copied to and from a GPU while it computes.
//!
//! Two layers have rows on the GPU: the layer at hand, and the next one, whose earlier rows arrive while the layer at hand
//! is computed. New rows go back to the host the same way.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};
use s2o_cuda::{Copies, CudaError, HostMemory, Mark};

use crate::error::{ModelError, Need, Result};
use crate::fused::LayerCache;
use crate::host_memory;

/// Keys and values `(1, capacity, num_kv_heads, head_dim)` of every layer.
#[derive(Debug)]
pub(super) struct HostLayers {
    // Before `host`: its drop waits for the copies.
    copies: Copies,
    host: Vec<[HostMemory; 2]>,
    slots: [[Tensor; 2]; 2],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    slots: [Slot; 2],
    /// The slot of the layer at hand.
    current: usize,
}

/// What the tensors of a slot hold.
#[derive(Debug, Default)]
struct Slot {
    layer: Option<usize>,
    /// Number of rows, from the first.
    rows: usize,
    /// The end of the copies to the slot, if no kernel waits for them yet.
    loaded: Option<Mark>,
}

impl HostLayers {
    /// Allocates the layers. `need` is the memory on the host.
    pub(super) fn new(
        num_layers: usize,
        shape: (usize, usize, usize, usize),
        dtype: DType,
        device: &Device,
        need: Need,
    ) -> Result<Self> {
        let cuda = device.as_cuda_device()?;
        if shape.0 != 1 {
            return Err(ModelError::input("sequences of a KV cache in host memory", 1, shape.0));
        }
        if host_memory::available().is_some_and(|free| free < need.bytes) {
            return Err(need.unmet_on_host());
        }
        let (_, capacity, heads, head_dim) = shape;
        let bytes = capacity * heads * head_dim * dtype.size_in_bytes();
        let slot = || -> candle_core::Result<_> {
            Ok([Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?])
        };
        Ok(Self {
            copies: Copies::new(cuda).map_err(candle_core::Error::from)?,
            host: allocate(num_layers, bytes, cuda).map_err(|error| need.on_host(error.into()))?,
            slots: [slot()?, slot()?],
            state: Mutex::default(),
        })
    }

    pub(super) fn num_layers(&self) -> usize {
        self.host.len()
    }

    /// Forgets the rows on the GPU from `len` on.
    pub(super) fn truncate(&self, len: usize) {
        self.state().slots.iter_mut().for_each(|slot| slot.rows = slot.rows.min(len));
    }

    /// Lets `write` write rows of a layer after its first `len`, and copies them to the host. It returns the queries of
    /// the new rows.
    pub(super) fn write(
        &self,
        layer: usize,
        len: usize,
        write: impl FnOnce(LayerCache) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let mut state = self.state();
        let slot = self.open(&mut state, layer, len)?;
        let [k, v] = &self.slots[slot];
        let q = write(LayerCache { k, v, start: len })?;
        let new = len..len + q.dim(1)?;
        state.slots[slot].rows = new.end;
        // The kernels that use the other slot were enqueued before.
        self.copies.follow_kernels()?;
        let next = (layer + 1) % self.num_layers();
        let rows = if next == 0 { new.end } else { len };
        if state.holding(next, rows).is_none() {
            self.load(&mut state, 1 - slot, next, rows)?;
        }
        for (side, host) in self.slots[slot].iter().zip(&self.host[layer]) {
            self.copies.store(side, new.clone(), host)?;
        }
        Ok(q)
    }

    /// Keys and values of a layer whose first `rows` rows are those of the layer.
    pub(super) fn layer(&self, layer: usize, rows: usize) -> candle_core::Result<&[Tensor; 2]> {
        Ok(&self.slots[self.open(&mut self.state(), layer, rows)?])
    }

    /// The slot that holds a layer's first `rows` rows, for the kernels that are enqueued from now on.
    fn open(&self, state: &mut State, layer: usize, rows: usize) -> Result<usize, CudaError> {
        let slot = match state.holding(layer, rows) {
            Some(slot) => slot,
            None => {
                self.copies.follow_kernels()?;
                self.load(state, 1 - state.current, layer, rows)?;
                1 - state.current
            }
        };
        if let Some(loaded) = state.slots[slot].loaded.take() {
            self.copies.kernels_follow(&loaded)?;
        }
        state.current = slot;
        Ok(slot)
    }

    /// Enqueues the copy of a layer's first `rows` rows to a slot, after the copies of what the slot held.
    fn load(&self, state: &mut State, slot: usize, layer: usize, rows: usize) -> Result<(), CudaError> {
        for (side, host) in self.slots[slot].iter().zip(&self.host[layer]) {
            self.copies.load(side, 0..rows, host)?;
        }
        if state.slots[1 - slot].layer == Some(layer) {
            state.slots[1 - slot].layer = None;
        }
        // Also without rows: kernels must not write rows that are still being copied to the host.
        state.slots[slot] = Slot { layer: Some(layer), rows, loaded: Some(self.copies.mark()?) };
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory for the keys and values of every layer. The system clears it, which several threads do faster.
fn allocate(num_layers: usize, bytes: usize, device: &CudaDevice) -> Result<Vec<[HostMemory; 2]>, CudaError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).clamp(1, num_layers);
    let sides = || -> Result<_, CudaError> { Ok([HostMemory::new(device, bytes)?, HostMemory::new(device, bytes)?]) };
    let layers = |range: Range<usize>| range.map(|_| sides()).collect::<Result<Vec<_>, _>>();
    thread::scope(|scope| {
        let shares = (0..threads).map(|i| num_layers * i / threads..num_layers * (i + 1) / threads);
        let workers: Vec<_> = shares.map(|share| scope.spawn(|| layers(share))).collect();
        let mut all = Vec::with_capacity(num_layers);
        for worker in workers {
            all.extend(worker.join().expect("allocation does not panic")?);
        }
        Ok(all)
    })
}

impl State {
    fn holding(&self, layer: usize, rows: usize) -> Option<usize> {
        (0..2).find(|&slot| self.slots[slot].layer == Some(layer) && self.slots[slot].rows >= rows)
    }
}
