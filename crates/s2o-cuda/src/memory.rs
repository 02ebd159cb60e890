//! Scratch memory: one pool per GPU, one allocation per call; and the pool of Candle's own allocations.
//!
//! Allocation and release are ordered on the call's stream, so calls on several streams or threads never share memory
//! that is in use, and nothing waits. The pool keeps released memory for the next call; it grows to the need of the
//! largest concurrent calls. Memory that is allocated while a stream captures a CUDA graph belongs to the graph.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result, sys};

use crate::error::{CudaError, Doing};

/// Alignment of every region in bytes: enough for any element type and vector access.
const ALIGN: usize = 256;

/// Bytes that the unused pool keeps when the host waits for the GPU: several times the default workspace.
const KEPT_BYTES: u64 = 1 << 30;

/// The scratch memory pool of one GPU, if its driver has memory pools.
#[derive(Debug)]
pub(crate) struct Pool(Option<sys::CUmemoryPool>);

// SAFETY: a pool is a handle; the driver synchronises its use.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool that keeps released memory. It is never destroyed: its library lives as long as the process.
    pub(crate) fn new(context: &CudaContext) -> Result<Self, CudaError> {
        if !context.has_async_alloc() {
            return Ok(Self(None));
        }
        context.bind_to_thread().doing("binding the context")?;
        let mut properties = MaybeUninit::<sys::CUmemPoolProps>::zeroed();
        let mut pool = MaybeUninit::uninit();
        // SAFETY: all fields of the properties are integers or pointers for which zero is valid, and enums that are set
        // here. A location is a kind and then an `int` in every version of the driver's interface; only the name of
        // the latter differs. The pool is read after the call that writes it succeeded.
        let pool = unsafe {
            let properties_at = properties.as_mut_ptr();
            let location = &raw mut (*properties_at).location;
            (*properties_at).allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            (*properties_at).handleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
            (*location).type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            location.cast::<i32>().add(1).write(context.ordinal() as i32);
            sys::cuMemPoolCreate(pool.as_mut_ptr(), properties_at).result().doing("making a memory pool")?;
            pool.assume_init()
        };
        keep(pool, KEPT_BYTES)?;
        Ok(Self(Some(pool)))
    }

    /// Memory for the regions of `layout`, valid until the scratch is dropped and for all work enqueued by then.
    pub(crate) fn allocate(&self, stream: &Arc<CudaStream>, layout: &Regions) -> Result<Scratch, CudaError> {
        const DOING: &str = "allocating scratch memory";
        let bytes = layout.0.max(ALIGN);
        let memory = match self.0 {
            Some(pool) => {
                let mut address = 0;
                // SAFETY: pool and stream are of the same device; the address is a local.
                unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream.cu_stream()) }
                    .result()
                    .doing(DOING)?;
                Memory::Pooled(address)
            }
            // SAFETY: kernels write the memory before they read it.
            None => Memory::Plain(unsafe { stream.alloc::<u8>(bytes) }.doing(DOING)?),
        };
        Ok(Scratch { memory, bytes, stream: Arc::clone(stream), used: None })
    }
}

/// Sets the bytes that a pool keeps when the host waits for the GPU, including those in use.
fn keep(pool: sys::CUmemoryPool, mut bytes: u64) -> Result<(), CudaError> {
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: this attribute is a 64-bit number.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) }
        .result()
        .doing("telling the memory pool to keep memory")
}

/// `[free, total]` bytes of the device. Free is memory that is free in the driver or unused in Candle's pool.
pub fn free_and_total(device: &CudaDevice) -> Result<[u64; 2], CudaError> {
    let (free, total) = device.cuda_stream().context().mem_get_info().doing("asking for free memory")?;
    let mut unused = 0;
    if let Some(pool) = pool_of(device)? {
        let ask = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: both attributes are 64-bit numbers.
            unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }
                .result()
                .doing("asking the memory pool")
                .map(|()| bytes)
        };
        let reserved = ask(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        unused = reserved.saturating_sub(ask(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?);
    }
    Ok([free as u64 + unused, total as u64])
}

/// Sets the release threshold of the pool of Candle's allocations to unlimited, so freed memory is reused.
pub fn keep_released(device: &CudaDevice) -> Result<(), CudaError> {
    match pool_of(device)? {
        Some(pool) => keep(pool, u64::MAX),
        None => Ok(()),
    }
}

/// The pool of Candle's allocations, if the driver has pools.
fn pool_of(device: &CudaDevice) -> Result<Option<sys::CUmemoryPool>, CudaError> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(None);
    }
    let mut pool = ptr::null_mut();
    // SAFETY: the pool is a local of the right type; the device is the context's own.
    unsafe { sys::cuDeviceGetMemPool(&mut pool, context.cu_device()) }.result().doing("looking up the memory pool")?;
    Ok(Some(pool))
}

/// Refuses to wait for a stream that is capturing a graph.
pub(crate) fn refuse_capture(stream: &CudaStream, doing: &'static str, instead: &'static str) -> Result<(), CudaError> {
    match is_capturing(stream)? {
        false => Ok(()),
        true => Err(CudaError::Capturing { doing, instead }),
    }
}

/// Whether the stream captures a graph.
pub(crate) fn is_capturing(stream: &CudaStream) -> Result<bool, CudaError> {
    let status = stream.capture_status().doing("asking whether a graph is captured")?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The layout of the regions of one allocation: its bytes so far.
#[derive(Debug, Default)]
pub struct Regions(usize);

/// A region of scratch memory that holds `len` elements.
#[derive(Debug, Clone, Copy)]
pub struct Region<T> {
    offset: usize,
    /// Number of elements.
    pub len: usize,
    elements: PhantomData<T>,
}

impl Regions {
    /// Adds a region of `len` elements.
    pub fn add<T>(&mut self, len: usize) -> Region<T> {
        let offset = self.0;
        self.0 = (offset + len * size_of::<T>()).next_multiple_of(ALIGN);
        Region { offset, len, elements: PhantomData }
    }
}

/// Scratch memory on the GPU, released in stream order when dropped.
#[derive(Debug)]
pub struct Scratch {
    memory: Memory,
    bytes: usize,
    stream: Arc<CudaStream>,
    /// After the work that uses the memory, if it outlives the call.
    used: Option<CudaEvent>,
}

#[derive(Debug)]
enum Memory {
    Pooled(sys::CUdeviceptr),
    Plain(CudaSlice<u8>),
}

impl Scratch {
    /// Address of a region on the device.
    pub fn at<T>(&self, region: Region<T>) -> *mut T {
        (self.base() + region.offset as u64) as *mut T
    }

    fn base(&self) -> sys::CUdeviceptr {
        match &self.memory {
            Memory::Pooled(address) => *address,
            // The scratch memory is not Candle's; the order of the stream makes its events unnecessary.
            Memory::Plain(slice) => slice.device_ptr(slice.stream()).0,
        }
    }

    /// Address of a region that lies within this memory.
    fn inside<T: Copy>(&self, region: Region<T>) -> Result<sys::CUdeviceptr, CudaError> {
        let end = region.offset + region.len * size_of::<T>();
        if end > self.bytes {
            let expected = format!("a region within {} bytes", self.bytes);
            return Err(CudaError::Size { name: "scratch memory", expected, got: end });
        }
        Ok(self.base() + region.offset as u64)
    }

    /// Copies from the host into the beginning of a region.
    ///
    /// # Errors
    /// If the data do not fit, or the stream captures a graph, which would keep the address of the data, not the data.
    pub fn upload<T: Copy>(&self, region: Region<T>, data: &[T]) -> Result<(), CudaError> {
        if data.len() > region.len {
            let expected = format!("at most {} elements", region.len);
            return Err(CudaError::Size { name: "upload to scratch memory", expected, got: data.len() });
        }
        let address = self.inside(region)?;
        refuse_capture(&self.stream, "copying lists to the GPU", "make this call outside the capture")?;
        // SAFETY: the region has room for the data. The driver has copied pageable memory when the call returns.
        unsafe { result::memcpy_htod_async(address, data, self.stream.cu_stream()) }.doing("copying to the GPU")
    }

    /// Sets a region to zeros, in the order of the stream of this memory.
    pub fn zero<T: Copy>(&self, region: Region<T>) -> Result<(), CudaError> {
        let address = self.inside(region)?;
        // SAFETY: the region has this many bytes.
        unsafe { result::memset_d8_async(address, 0, region.len * size_of::<T>(), self.stream.cu_stream()) }
            .doing("zeroing scratch memory")
    }

    /// Lets another thread read or drop this memory after the work that was enqueued so far. The stream of a Candle device may
    /// be another one on each thread, so the order of the stream is not enough.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn outlive_call(&mut self) -> Result<(), CudaError> {
        self.used = Some(self.stream.record_event(None).doing("recording an event")?);
        Ok(())
    }

    /// Work of this thread begins after the work that uses the memory.
    fn follow_use(&self) -> Result<(), DriverError> {
        self.used.as_ref().map_or(Ok(()), |used| self.stream.wait(used))
    }

    /// Copies a region to the host and waits. The GPU must have written it, and every bit pattern must be a valid `T`.
    ///
    /// # Errors
    /// If the stream captures a graph, or the driver fails.
    pub fn download<T: DeviceRepr + Copy + Default>(&self, region: Region<T>) -> Result<Vec<T>, CudaError> {
        let address = self.inside(region)?;
        refuse_capture(&self.stream, "reading results back", "ask for none in the capture")?;
        let mut data = vec![T::default(); region.len];
        // Results may be read on another thread than the call's.
        self.stream.context().bind_to_thread().doing("binding the context")?;
        self.follow_use().doing("waiting for the call")?;
        // SAFETY: the region has as many elements as `data`, which lives until the copy has been awaited.
        unsafe { result::memcpy_dtoh_async(&mut data, address, self.stream.cu_stream()) }
            .and_then(|()| self.stream.synchronize())
            .doing("copying from the GPU")?;
        Ok(data)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Memory::Pooled(address) = &self.memory {
            let context = self.stream.context();
            context.record_err(context.bind_to_thread());
            context.record_err(self.follow_use());
            // SAFETY: allocated on this stream and not released before. The context keeps an error for its next check.
            context.record_err(unsafe { result::free_async(*address, self.stream.cu_stream()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap() {
        let mut layout = Regions::default();
        let (a, b, c) = (layout.add::<i32>(3), layout.add::<u8>(0), layout.add::<f32>(100));
        assert_eq!((a.offset, b.offset, c.offset), (0, ALIGN, ALIGN));
        assert_eq!(layout.0, 3 * ALIGN);
    }
}
