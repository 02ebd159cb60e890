//! Code that all attention ops share: the operand check and the dispatch to a backend.
//!
//! A call passes through the op ([`crate::ops`]), [`apply`] in this file, the backend's adapter
//! ([`crate::cpu`], [`crate::cuda`]) and the computation, in this order. Its [`Output`] becomes a node of Candle's
//! graph.

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor, bail};
use s2o_core::{AttnShape, S2oError, ScoreScale};

use crate::error::AttnError;

/// An attention op, independent of the backend.
pub(crate) trait AttnOp {
    /// Name of the op in Candle's graph.
    const NAME: &'static str;
    /// Whether the op has an output in the shape of `q`.
    const HAS_OUTPUT: bool = true;
    /// Result of a call in addition to its output.
    type Report;
}

/// An op on the backend whose storage is `S`.
pub(crate) trait Compute<S: BackendStorage>: AttnOp {
    /// Returns the output (contiguous, in the shape of `q`) if the op has one, and the report.
    fn compute(&self, qkv: &Qkv<'_, S>) -> Result<(Option<S>, Self::Report), AttnError>;
}

/// Without the feature `cuda` no op has kernels for a GPU.
#[cfg(not(feature = "cuda"))]
impl<K: AttnOp> Compute<CudaStorage> for K {
    fn compute(&self, _: &Qkv<'_, CudaStorage>) -> Result<(Option<CudaStorage>, K::Report), AttnError> {
        Err(AttnError::Device { name: "q", got: "CUDA" })
    }
}

/// Queries, keys and values of one call, checked against each other.
pub(crate) struct Qkv<'a, S> {
    pub(crate) shape: AttnShape,
    pub(crate) dtype: DType,
    /// Checked.
    pub(crate) scale: ScoreScale,
    /// `q`, `k` and `v`, each with 4 dimensions and dtype `dtype`, in any layout.
    pub(crate) operands: [(&'a S, &'a Layout); 3],
}

impl<'a, S: BackendStorage> Qkv<'a, S> {
    /// Checks shapes, dtypes and the scale, for all backends. A backend then checks its own limits.
    pub(crate) fn new(operands: [(&'a S, &'a Layout); 3], scale: ScoreScale) -> Result<Self, AttnError> {
        let dtype = operands[0].0.dtype();
        let mut dims = [[0; 4]; 3];
        for ((name, (storage, layout)), dims) in ["q", "k", "v"].into_iter().zip(operands).zip(&mut dims) {
            *dims = layout.dims().try_into().map_err(|_| AttnError::Rank { name, got: layout.dims().to_vec() })?;
            let got = storage.dtype();
            if !matches!(got, DType::F32 | DType::F16 | DType::BF16) {
                return Err(AttnError::DType { name, got });
            }
            if got != dtype {
                return Err(AttnError::DTypeMismatch { name, expected: dtype, got });
            }
        }
        let [q, k, v] = dims;
        let shape = AttnShape::of(q, k, v).map_err(S2oError::from)?;
        Ok(Self { shape, dtype, scale: scale.checked()?, operands })
    }
}

/// Computes an op on tensors.
pub(crate) fn apply<K: Compute<CpuStorage> + Compute<CudaStorage>>(
    op: &K,
    scale: impl Into<ScoreScale>,
    [q, k, v]: [&Tensor; 3],
) -> Result<(Tensor, K::Report), AttnError> {
    let (output, report) = compute(op, scale.into(), [q, k, v])?;
    Ok((q.apply_op3(k, v, Output { name: K::NAME, storage: Mutex::new(output) })?, report))
}

/// Computes an op. Its output, if it has one, is not yet part of Candle's graph.
pub(crate) fn compute<K: Compute<CpuStorage> + Compute<CudaStorage>>(
    op: &K,
    scale: ScoreScale,
    [q, k, v]: [&Tensor; 3],
) -> Result<(Option<Storage>, K::Report), AttnError> {
    for (name, tensor) in [("k", k), ("v", v)] {
        if !tensor.device().same_device(q.device()) {
            let [expected, got] = [q, tensor].map(|tensor| tensor.device().location());
            return Err(AttnError::DeviceMismatch { name, expected, got });
        }
    }
    let [(q, q_layout), (k, k_layout), (v, v_layout)] = [q, k, v].map(Tensor::storage_and_layout);
    match (&*q, &*k, &*v) {
        (Storage::Cpu(q), Storage::Cpu(k), Storage::Cpu(v)) => {
            let (output, report) = op.compute(&Qkv::new([(q, q_layout), (k, k_layout), (v, v_layout)], scale)?)?;
            Ok((output.map(Storage::Cpu), report))
        }
        (Storage::Cuda(q), Storage::Cuda(k), Storage::Cuda(v)) => {
            let (output, report) = op.compute(&Qkv::new([(q, q_layout), (k, k_layout), (v, v_layout)], scale)?)?;
            Ok((output.map(Storage::Cuda), report))
        }
        _ => Err(AttnError::Device { name: "q", got: "Metal" }),
    }
}

/// Computes an op that Candle applies. The error keeps the message of the [`AttnError`] but not its type.
pub(crate) fn forward<K: Compute<S>, S: BackendStorage>(
    op: &K,
    scale: ScoreScale,
    operands: [(&S, &Layout); 3],
) -> candle_core::Result<(S, Shape)> {
    let qkv = Qkv::new(operands, scale)?;
    match op.compute(&qkv)? {
        (Some(output), _) => Ok((output, operands[0].1.shape().clone())),
        (None, _) => bail!("{}: expected an output, got none", K::NAME),
    }
}

/// An output that is already computed, as the op that Candle records: `backward` through it is an error instead of a
/// silent loss of gradients.
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
