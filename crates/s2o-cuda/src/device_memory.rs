//! The memory pool of Candle's own allocations on a GPU.

use std::ptr;

use candle_core::cuda_backend::CudaDevice;
use cudarc::driver::sys;

use crate::error::{CudaError, Doing};
use crate::memory::keep;

/// `[free, total]` bytes of the device. Free is memory that is free in the driver or unused in Candle's pool.
///
/// # Errors
/// If the driver fails.
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
///
/// # Errors
/// If the driver fails.
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
