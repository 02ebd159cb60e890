//! The output of an op as a node of Candle's graph: `backward` through it is an error instead of a silent loss of
//! gradients.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Shape, Storage, Tensor, bail};

/// Adds the computed output of the op `name` on `q`, `k` and `v` to Candle's graph.
pub(crate) fn attach(
    name: &'static str,
    output: Option<Storage>,
    [q, k, v]: [&Tensor; 3],
) -> candle_core::Result<Tensor> {
    q.apply_op3(k, v, Output { name, storage: Mutex::new(output) })
}

/// An output that is already computed, as the op that Candle records.
struct Output {
    name: &'static str,
    storage: Mutex<Option<Storage>>,
}

impl Output {
    fn take(&self) -> Option<Storage> {
        self.storage.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl CustomOp3 for Output {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        q_layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.take() {
            Some(Storage::Cpu(output)) => Ok((output, q_layout.shape().clone())),
            _ => bail!("{}: expected an output on the CPU, got none", self.name),
        }
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        q_layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.take() {
            Some(Storage::Cuda(output)) => Ok((output, q_layout.shape().clone())),
            _ => bail!("{}: expected an output on the GPU, got none", self.name),
        }
    }
}
