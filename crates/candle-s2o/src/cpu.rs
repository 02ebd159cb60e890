//! From Candle's CPU storage to the plain Rust path, in place: strides and offsets are followed, nothing is copied.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Shape, WithDType};
use s2o_core::cpu::{Element, Inputs, Strided};

use crate::error::AttnError;
use crate::op::Kernel;

/// One operand: the storage and how it lies.
pub(crate) type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// Runs `kernel` on `q`, `k`, `v`: the output has the shape of `q`, contiguous.
pub(crate) fn run<K: Kernel>(
    kernel: &K,
    operands: [Operand<'_>; 3],
) -> Result<(CpuStorage, Shape, K::Report), AttnError> {
    match operands[0].0 {
        CpuStorage::F32(_) => typed::<f32, K>(kernel, operands),
        CpuStorage::F16(_) => typed::<half::f16, K>(kernel, operands),
        CpuStorage::BF16(_) => typed::<half::bf16, K>(kernel, operands),
        other => Err(AttnError::DType { name: "q", got: other.dtype() }),
    }
}

fn typed<T: Element + WithDType, K: Kernel>(
    kernel: &K,
    operands: [Operand<'_>; 3],
) -> Result<(CpuStorage, Shape, K::Report), AttnError> {
    let [q, k, v] = operands;
    let operands = (strided::<T>("q", q)?, strided::<T>("k", k)?, strided::<T>("v", v)?);
    let inputs = Inputs::new(operands.0, operands.1, operands.2, kernel.softmax_scale())?;
    let mut out = vec![T::default(); q.1.shape().elem_count()];
    let report = kernel.cpu(&inputs, &mut out)?;
    Ok((T::to_cpu_storage_owned(out), q.1.shape().clone(), report))
}

fn strided<'a, T: Element + WithDType>(
    name: &'static str,
    (storage, layout): Operand<'a>,
) -> Result<Strided<'a, T>, AttnError> {
    let data = storage.as_slice::<T>().map_err(|_| AttnError::DTypeMismatch {
        name,
        expected: T::DTYPE,
        got: storage.dtype(),
    })?;
    let dims: [usize; 4] =
        layout.dims().try_into().map_err(|_| AttnError::Rank { name, got: layout.dims().to_vec() })?;
    let strides: [usize; 4] = layout.stride().try_into().expect("as many strides as dimensions");
    let data = data.get(layout.start_offset()..).unwrap_or_default();
    Ok(Strided::new(name, data, dims, strides).map_err(s2o_core::S2oError::from)?)
}
