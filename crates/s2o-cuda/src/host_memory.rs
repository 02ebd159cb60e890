//! Rows of a tensor in pinned memory of the host, and copies of them that run next to the kernels.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use half::{bf16, f16};

use crate::error::{CudaError, Doing};
use crate::operand::unaligned_address;

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
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // An error would concern the process: nothing can be done about it here.
        let _ = self.context.bind_to_thread();
        // SAFETY: the address is of `malloc_host`, and `Copies` has waited for its stream, see there.
        let _ = unsafe { result::free_host(self.address) };
    }
}

/// A stream for copies between a GPU and [`HostMemory`]. Whoever drops the memory drops this first, which waits for the
/// copies.
#[derive(Debug)]
pub struct Copies {
    stream: Arc<CudaStream>,
    kernels: Arc<CudaStream>,
}

/// The end of the copies, or of the kernels, that were enqueued before it.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl Copies {
    /// Copies for the kernels on the stream of `device`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let kernels = device.cuda_stream();
        let stream = kernels.context().new_stream().doing("making a stream for copies")?;
        Ok(Self { stream, kernels })
    }

    /// Later copies begin after the kernels that are enqueued by now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn follow_kernels(&self) -> Result<(), CudaError> {
        let reached = self.kernels.record_event(None).doing("recording an event")?;
        self.stream.wait(&reached).doing("waiting for kernels")
    }

    /// The end of the copies that are enqueued by now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn mark(&self) -> Result<Mark, CudaError> {
        self.stream.record_event(None).map(Mark).doing("recording an event")
    }

    /// Later kernels begin after `mark`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn kernels_follow(&self, mark: &Mark) -> Result<(), CudaError> {
        self.kernels.wait(&mark.0).doing("waiting for copies")
    }

    /// Enqueues a copy of the rows `rows` of `tensor` (1, capacity, ..), contiguous, to the same rows of `host`.
    ///
    /// # Errors
    /// If the tensor is not a contiguous one of 16 or 32 bits on the GPU, or `host` has other rows.
    pub fn store(&self, tensor: &Tensor, rows: Range<usize>, host: &HostMemory) -> Result<(), CudaError> {
        self.copy(tensor, rows, host, |on_gpu, on_host, stream| {
            // SAFETY: both ranges lie within their memory, which outlives the copy (see `Copies`).
            unsafe { result::memcpy_dtoh_async(&mut *on_host, on_gpu, stream) }
        })
    }

    /// Enqueues a copy of the rows `rows` of `host` to the same rows of `tensor`.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn load(&self, tensor: &Tensor, rows: Range<usize>, host: &HostMemory) -> Result<(), CudaError> {
        self.copy(tensor, rows, host, |on_gpu, on_host, stream| {
            // SAFETY: as in `store`.
            unsafe { result::memcpy_htod_async(on_gpu, &*on_host, stream) }
        })
    }

    fn copy(
        &self,
        tensor: &Tensor,
        rows: Range<usize>,
        host: &HostMemory,
        copy: impl FnOnce(sys::CUdeviceptr, *mut [u8], sys::CUstream) -> Result<(), cudarc::driver::DriverError>,
    ) -> Result<(), CudaError> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let capacity = tensor.dim(1)?;
        let whole = format!("{bytes}, as the tensor");
        if tensor.dim(0)? != 1 || bytes != host.bytes {
            return Err(CudaError::Size { name: "bytes of host memory", expected: whole, got: host.bytes });
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
            DType::F32 => unaligned_address::<f32>(&storage, layout, &self.kernels)?,
            DType::F16 => unaligned_address::<f16>(&storage, layout, &self.kernels)?,
            _ => unaligned_address::<bf16>(&storage, layout, &self.kernels)?,
        };
        let row = bytes / capacity;
        let (from, len) = (rows.start * row, rows.len() * row);
        // SAFETY: the rows lie within the memory, as checked above.
        let on_host = unsafe { host.address.cast::<u8>().add(from) };
        let on_host = std::ptr::slice_from_raw_parts_mut(on_host, len);
        self.stream.context().bind_to_thread().doing("binding the context")?;
        copy(address + from as sys::CUdeviceptr, on_host, self.stream.cu_stream()).doing("copying rows")
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // After an error of the driver no copy runs any more.
        let _ = self.stream.synchronize();
    }
}
