//! Peak GPU memory of a run, beyond the memory in use before it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use cudarc::driver::sys::CUmemPool_attribute as Attribute;
use cudarc::driver::{CudaContext, result, sys};

use crate::measure::gpu::Gpu;

/// Bytes beyond those in use before the run.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    /// Allocated from the device's default pool, which Candle uses; `None` if the driver has no pools.
    pub used: Option<u64>,
    /// Reserved by that pool.
    pub reserved: Option<u64>,
    /// Taken from the whole GPU, as sampled, including cuBLAS's workspaces, our kernels' own pool and other processes.
    /// A short peak between two samples is missed.
    pub device: u64,
}

/// Runs `run` and watches the memory.
pub fn peak<T>(gpu: &Gpu, run: impl FnOnce() -> Result<T>) -> Result<(T, Peak)> {
    const EVERY: Duration = Duration::from_millis(2);
    let context = gpu.context();
    gpu.device.synchronize()?;
    let pool = DefaultPool::of(context)?;
    let before = pool.as_ref().map(DefaultPool::reset).transpose()?;
    let free_before = context.mem_get_info()?.0;
    let done = AtomicBool::new(false);
    let (out, least_free) = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| -> Result<usize> {
            context.bind_to_thread()?;
            let mut least = free_before;
            while !done.load(Ordering::Relaxed) {
                least = least.min(context.mem_get_info()?.0);
                std::thread::sleep(EVERY);
            }
            Ok(least)
        });
        let out = run().and_then(|out| {
            gpu.device.synchronize()?;
            Ok(out)
        });
        done.store(true, Ordering::Relaxed);
        let least = sampler.join().ok().context("the memory sampler panicked")?;
        Ok::<_, anyhow::Error>((out?, least?))
    })?;
    let beyond = |attribute, before: u64| -> Result<Option<u64>> {
        let high = pool.as_ref().map(|pool| pool.read(attribute)).transpose()?;
        Ok(high.map(|high| high.saturating_sub(before)))
    };
    let [used, reserved] = before.unwrap_or_default();
    let peak = Peak {
        used: beyond(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, used)?,
        reserved: beyond(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, reserved)?,
        device: free_before.saturating_sub(least_free) as u64,
    };
    Ok((out, peak))
}

/// The pool of `cuMemAllocAsync`.
struct DefaultPool(sys::CUmemoryPool);

impl DefaultPool {
    fn of(context: &CudaContext) -> Result<Option<Self>> {
        if !context.has_async_alloc() {
            return Ok(None);
        }
        // SAFETY: the device is that of a live context.
        Ok(Some(Self(unsafe { result::device::get_mem_pool(context.cu_device()) }?)))
    }

    /// Resets the high-water marks to the memory in use and reserved, and returns these two numbers.
    fn reset(&self) -> Result<[u64; 2]> {
        for attribute in [Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] {
            let mut zero = 0u64;
            // SAFETY: the pool is the device's, and both attributes are 64-bit numbers that may be set to 0.
            unsafe { result::mem_pool::set_attribute(self.0, attribute, (&raw mut zero).cast::<c_void>()) }?;
        }
        Ok([
            self.read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            self.read(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        ])
    }

    fn read(&self, attribute: Attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: the pool is the device's, and the requested attributes are 64-bit numbers.
        unsafe { result::mem_pool::get_attribute(self.0, attribute, (&raw mut value).cast::<c_void>()) }?;
        Ok(value)
    }
}
