//! Scratch memory: a pool of our own for each GPU, one allocation for each call.
//!
//! Allocation and release are ordered on the call's stream, so calls on several streams or threads never share memory
//! that is in use, and nothing waits. The pool keeps what calls release, so that the next call finds it; it grows to
//! what the largest calls that ran together needed. While a stream captures a CUDA graph, the memory becomes the graph's.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, CudaStream, result, sys};

use super::error::{CudaError, Doing};
use super::library::refuse_capture;
use crate::device_memory::DeviceMemory;
use crate::error::AttnError;

/// Every region begins at a multiple of this: enough for any element type and vector access.
const ALIGN: usize = 256;

/// Memory that the pool keeps when nobody uses it: several times the default workspace. More goes back to the driver when
/// the host next waits for the GPU.
const KEPT_BYTES: u64 = 1 << 30;

/// Memory that one GPU keeps for scratch, if its driver has memory pools.
#[derive(Debug)]
pub(super) struct Pool(Option<sys::CUmemoryPool>);

// SAFETY: a pool is a handle; the driver synchronises its use.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool that keeps what is released. It is never destroyed: its library lives as long as the process.
    pub(super) fn new(context: &CudaContext) -> Result<Self, CudaError> {
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

    /// Memory for the regions of `layout` until the scratch is dropped, and for what was enqueued by then.
    pub(super) fn allocate(&self, stream: &Arc<CudaStream>, layout: &Regions) -> Result<Scratch, CudaError> {
        const DOING: &str = "allocating scratch memory";
        let bytes = layout.bytes.max(ALIGN);
        let memory = match self.0 {
            Some(pool) => {
                let mut address = 0;
                // SAFETY: pool and stream are of the same device; the address is a local.
                unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream.cu_stream()) }
                    .result()
                    .doing(DOING)?;
                Memory::Pooled { address, stream: Arc::clone(stream) }
            }
            // SAFETY: kernels write the memory before they read it.
            None => Memory::Plain(unsafe { stream.alloc::<u8>(bytes) }.doing(DOING)?),
        };
        Ok(Scratch(memory))
    }
}

/// What Candle's allocations on this device can still get.
pub(crate) fn device_memory(device: &CudaDevice) -> Result<DeviceMemory, AttnError> {
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
    Ok(DeviceMemory { free: free as u64 + unused, total: total as u64 })
}

/// Lets the pool of Candle's allocations on this device keep what they release.
pub(crate) fn keep_released(device: &CudaDevice) -> Result<(), AttnError> {
    match pool_of(device)? {
        Some(pool) => Ok(keep(pool, u64::MAX)?),
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

/// Lets a pool keep `bytes` when the host waits for the GPU, those in use included.
fn keep(pool: sys::CUmemoryPool, mut bytes: u64) -> Result<(), CudaError> {
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: this attribute is a 64-bit number.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) }
        .result()
        .doing("telling the memory pool to keep memory")
}

/// What a call wants to hold, added up.
#[derive(Debug, Default)]
pub(super) struct Regions {
    bytes: usize,
}

/// Where in the scratch memory `len` elements lie.
#[derive(Debug)]
pub(super) struct Region<T> {
    offset: usize,
    pub(super) len: usize,
    elements: PhantomData<T>,
}

impl<T> Clone for Region<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Region<T> {}

impl Regions {
    /// Room for `len` elements.
    pub(super) fn add<T>(&mut self, len: usize) -> Region<T> {
        let offset = self.bytes;
        self.bytes = (offset + len * size_of::<T>()).next_multiple_of(ALIGN);
        Region { offset, len, elements: PhantomData }
    }
}

/// Scratch memory of one call.
#[derive(Debug)]
pub(super) struct Scratch(Memory);

#[derive(Debug)]
enum Memory {
    Pooled { address: sys::CUdeviceptr, stream: Arc<CudaStream> },
    Plain(CudaSlice<u8>),
}

impl Scratch {
    /// Address of a region on the device.
    pub(super) fn at<T>(&self, region: Region<T>) -> *mut T {
        (self.base() + region.offset as u64) as *mut T
    }

    fn base(&self) -> sys::CUdeviceptr {
        match &self.0 {
            Memory::Pooled { address, .. } => *address,
            Memory::Plain(slice) => {
                // The scratch memory is not Candle's: its events say nothing that the stream's order does not.
                use candle_core::cuda_backend::cudarc::driver::DevicePtr;
                slice.device_ptr(slice.stream()).0
            }
        }
    }

    /// Copies from the host into the beginning of a region. A graph would remember where the data were, not what.
    pub(super) fn upload<T: Copy>(&self, stream: &CudaStream, region: Region<T>, data: &[T]) -> Result<(), CudaError> {
        assert!(data.len() <= region.len, "{} elements do not fit {}", data.len(), region.len);
        refuse_capture(stream, "copying lists to the GPU", "make this call outside the capture")?;
        // SAFETY: the region holds the data. It is pageable memory, which the driver has copied when the call returns.
        unsafe { result::memcpy_htod_async(self.at(region) as u64, data, stream.cu_stream()) }
            .doing("copying to the GPU")
    }

    /// Sets a region to zeros.
    pub(super) fn zero<T>(&self, stream: &CudaStream, region: Region<T>) -> Result<(), CudaError> {
        let bytes = region.len * size_of::<T>();
        // SAFETY: the region has this many bytes.
        unsafe { result::memset_d8_async(self.at(region) as u64, 0, bytes, stream.cu_stream()) }
            .doing("zeroing scratch memory")
    }

    /// Copies a region to the host, and waits for it.
    pub(super) fn download<T: Copy + Default>(
        &self,
        stream: &CudaStream,
        region: Region<T>,
    ) -> Result<Vec<T>, CudaError> {
        refuse_capture(stream, "reading results back", "ask for none in the capture")?;
        let mut data = vec![T::default(); region.len];
        // SAFETY: the region has as many elements as `data`, which lives until the copy has been awaited.
        unsafe { result::memcpy_dtoh_async(&mut data, self.at(region) as u64, stream.cu_stream()) }
            .and_then(|()| stream.synchronize())
            .doing("copying from the GPU")?;
        Ok(data)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Memory::Pooled { address, stream } = &self.0 {
            // SAFETY: allocated on this stream and not released before. An error is kept for whoever asks the context.
            let released = unsafe { result::free_async(*address, stream.cu_stream()) };
            stream.context().record_err(released);
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
        assert_eq!(layout.bytes, 3 * ALIGN);
    }
}
