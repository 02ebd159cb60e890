//! Tensors that kernels write.

use std::cell::RefCell;

use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, CudaStorage, Error, InplaceOp1, Layout, Shape, Tensor, bail};
use cudarc::driver::{CudaStream, DevicePtrMut, DeviceRepr, sys};
use s2o_cuda::{CudaError, View, is_vectorized};

type Result<T> = std::result::Result<T, CudaError>;

/// `dims` with another last dimension.
pub(super) fn with_width(dims: &[usize], width: usize) -> Shape {
    let mut dims = dims.to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    Shape::from(dims)
}

/// Lets `write` enqueue work that writes into a tensor (batch, length, heads, head_dim) by 16-byte accesses to 16 bits, or
/// 8-byte accesses to 8 bits.
pub(super) fn written<T: CudaDType + DeviceRepr>(
    tensor: &Tensor,
    stream: &CudaStream,
    write: impl FnOnce(View) -> Result<()>,
) -> Result<()> {
    if !is_vectorized(tensor.layout()) {
        let message = format!("expected a cache of contiguous heads aligned to 16 bytes, got {:?}", tensor.layout());
        return Err(Error::Msg(message).bt().into());
    }
    written_at::<T>(tensor, stream, |base, layout| write(View::new::<T>(base, layout)?))
}

/// Lets `write` enqueue work that writes into a tensor, whose storage begins at the given address. Candle gives mutable
/// storage only to in-place ops.
pub(super) fn written_at<T: CudaDType + DeviceRepr>(
    tensor: &Tensor,
    stream: &CudaStream,
    write: impl FnOnce(sys::CUdeviceptr, &Layout) -> Result<()>,
) -> Result<()> {
    let op = WriteOp(RefCell::new(Some(|storage: &mut CudaStorage, layout: &Layout| {
        let (base, _guard) = T::as_cuda_slice_mut(storage)?.device_ptr_mut(stream);
        Ok(write(base, layout)?)
    })));
    Ok(tensor.inplace_op1(&op)?)
}

/// [`written_at`] for a contiguous tensor, whose first element has the given address.
pub(super) fn written_from<T: CudaDType + DeviceRepr>(
    tensor: &Tensor,
    stream: &CudaStream,
    write: impl FnOnce(sys::CUdeviceptr) -> Result<()>,
) -> Result<()> {
    written_at::<T>(tensor, stream, |base, layout| {
        write(base + (layout.start_offset() * size_of::<T>()) as sys::CUdeviceptr)
    })
}

struct WriteOp<F>(RefCell<Option<F>>);

impl<F: FnOnce(&mut CudaStorage, &Layout) -> candle_core::Result<()>> InplaceOp1 for WriteOp<F> {
    fn name(&self) -> &'static str {
        "s2o-write"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(CudaError::NotOnGpu.into())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        match self.0.take() {
            Some(write) => write(storage, layout),
            None => bail!("a tensor was written twice by one op"),
        }
    }
}
