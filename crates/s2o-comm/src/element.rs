//! Elements of tensors as little-endian bytes.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};

use crate::{CommError, Result};

/// The dtypes that can be sent, at the place of their code in a header.
pub(crate) const SENT: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::U32, DType::U8];

/// Refuses a tensor that is not on the CPU or has another dtype than those in [`SENT`].
pub(crate) fn check(name: &'static str, x: &Tensor) -> Result<()> {
    if !SENT.contains(&x.dtype()) {
        return Err(CommError::DType { name, expected: "F32, BF16, F16, U32 or U8", got: x.dtype() });
    }
    if !x.device().is_cpu() {
        return Err(CommError::NotOnCpu { name });
    }
    Ok(())
}

/// Appends the elements of `x`, which passed [`check`], in row-major order.
pub(crate) fn append(name: &'static str, x: &Tensor, bytes: &mut Vec<u8>) -> Result<()> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Err(CommError::NotOnCpu { name }) };
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match storage {
        CpuStorage::F32(x) => extend(bytes, &x[range], f32::to_le_bytes),
        CpuStorage::BF16(x) => extend(bytes, &x[range], bf16::to_le_bytes),
        CpuStorage::F16(x) => extend(bytes, &x[range], f16::to_le_bytes),
        CpuStorage::U32(x) => extend(bytes, &x[range], u32::to_le_bytes),
        CpuStorage::U8(x) => bytes.extend_from_slice(&x[range]),
        other => return Err(CommError::DType { name, expected: "F32, BF16, F16, U32 or U8", got: other.dtype() }),
    }
    Ok(())
}

fn extend<T: Copy, const N: usize>(bytes: &mut Vec<u8>, elements: &[T], write: impl Fn(T) -> [u8; N]) {
    let start = bytes.len();
    bytes.resize(start + N * elements.len(), 0);
    for (bytes, &element) in bytes[start..].as_chunks_mut().0.iter_mut().zip(elements) {
        *bytes = write(element);
    }
}

/// A tensor on the CPU of these elements.
pub(crate) fn tensor(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    // Candle reads bytes in the order of the host: all its targets are little-endian.
    const { assert!(cfg!(target_endian = "little")) };
    Ok(Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu)?)
}

/// The sum of `parts`, element by element, in their order, in f32, rounded once to `dtype`. The parts have one length.
pub(crate) fn sum(parts: &[Vec<u8>], dtype: DType) -> Result<Vec<u8>> {
    match dtype {
        DType::F32 => Ok(sum_of(parts, f32::from_le_bytes, f32::to_le_bytes)),
        DType::BF16 => Ok(sum_of(parts, |x| bf16::from_le_bytes(x).to_f32(), |x| bf16::from_f32(x).to_le_bytes())),
        DType::F16 => Ok(sum_of(parts, |x| f16::from_le_bytes(x).to_f32(), |x| f16::from_f32(x).to_le_bytes())),
        got => Err(CommError::DType { name: "x", expected: "F32, BF16 or F16", got }),
    }
}

fn sum_of<const N: usize>(parts: &[Vec<u8>], read: impl Fn([u8; N]) -> f32, write: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let Some((first, others)) = parts.split_first() else { return Vec::new() };
    let mut sum: Vec<f32> = first.as_chunks::<N>().0.iter().map(|&x| read(x)).collect();
    for part in others {
        for (sum, &x) in sum.iter_mut().zip(part.as_chunks::<N>().0) {
            *sum += read(x);
        }
    }
    let mut bytes = Vec::new();
    extend(&mut bytes, &sum, write);
    bytes
}
