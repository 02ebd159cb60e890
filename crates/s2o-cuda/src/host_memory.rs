//! Rows of a tensor in pinned memory of the host, and copies of them that run next to the kernels.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Tensor};
use cudarc::driver::{CudaContext, result, sys};
use half::{bf16, f16};

use crate::error::{CudaError, Doing};
use crate::operand::unaligned_address;
use crate::side_stream::SideStream;

/// Pinned memory of the host, to which a GPU copies without a detour.
#[derive(Debug)]
pub struct HostMemory {
    address: *mut c_void,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory is only accessed by copies, which a stream orders.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `bytes`, whose contents are arbitrary.
    ///
    /// # Errors
    /// If the driver fails, for example because the host has too little memory.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Self, CudaError> {
        let context = Arc::clone(device.cuda_stream().context());
        context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the memory is released only by the drop below.
        let address = unsafe { result::malloc_host(bytes, 0) }.doing("allocating pinned memory of the host")?;
        Ok(Self { address, bytes, context })
    }

    /// Enqueues a copy of the rows `rows` of `tensor` (1, capacity, ..), contiguous, to the same rows of this memory.
    ///
    /// # Errors
    /// If the tensor is not a contiguous one of 16 or 32 bits on the GPU, or this memory has other rows.
    pub fn store(&self, stream: &SideStream, tensor: &Tensor, rows: Range<usize>) -> Result<(), CudaError> {
        self.copy(stream, tensor, rows, |on_gpu, on_host, stream| {
            // SAFETY: both ranges lie within their memory, which outlives the copy (see `SideStream`).
            unsafe { result::memcpy_dtoh_async(&mut *on_host, on_gpu, stream) }
        })
    }

    /// Enqueues a copy of the rows `rows` of this memory to the same rows of `tensor`.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn load(&self, stream: &SideStream, tensor: &Tensor, rows: Range<usize>) -> Result<(), CudaError> {
        self.copy(stream, tensor, rows, |on_gpu, on_host, stream| {
            // SAFETY: as in `store`.
            unsafe { result::memcpy_htod_async(on_gpu, &*on_host, stream) }
        })
    }

    fn copy(
        &self,
        stream: &SideStream,
        tensor: &Tensor,
        rows: Range<usize>,
        copy: impl FnOnce(sys::CUdeviceptr, *mut [u8], sys::CUstream) -> Result<(), cudarc::driver::DriverError>,
    ) -> Result<(), CudaError> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let capacity = tensor.dim(1)?;
        let whole = format!("{bytes}, as the tensor");
        if tensor.dim(0)? != 1 || bytes != self.bytes {
            return Err(CudaError::Size { name: "bytes of host memory", expected: whole, got: self.bytes });
        }
        if rows.start > rows.end || rows.end > capacity {
            let expected = format!("a range up to {capacity}");
            return Err(CudaError::Size { name: "rows", expected, got: rows.end });
        }
        if rows.is_empty() {
            return Ok(());
        }
        let (storage, layout) = tensor.storage_and_layout();
        let (address, _guard) = match tensor.dtype() {
            DType::F32 => unaligned_address::<f32>(&storage, layout, stream.kernels())?,
            DType::F16 => unaligned_address::<f16>(&storage, layout, stream.kernels())?,
            _ => unaligned_address::<bf16>(&storage, layout, stream.kernels())?,
        };
        let row = bytes / capacity;
        let (from, len) = (rows.start * row, rows.len() * row);
        // SAFETY: the rows lie within the memory, as checked above.
        let on_host = unsafe { self.address.cast::<u8>().add(from) };
        let on_host = std::ptr::slice_from_raw_parts_mut(on_host, len);
        copy(address + from as sys::CUdeviceptr, on_host, stream.bound()?).doing("copying rows")
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // An error would concern the process: nothing can be done about it here.
        let _ = self.context.bind_to_thread();
        // SAFETY: the address is of `malloc_host`, and `SideStream` has waited for its copies, see there.
        let _ = unsafe { result::free_host(self.address) };
    }
}
