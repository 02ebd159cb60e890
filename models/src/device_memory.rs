//! The free memory of a GPU, and the detection of out-of-memory errors.

use candle_core::{Device, Error};

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Memory that Candle can still allocate: free in the driver, or unused in its pools.
    pub free: u64,
    /// All memory of the GPU.
    pub total: u64,
}

impl DeviceMemory {
    /// Asks the driver; `None` unless this is an NVIDIA GPU. Does not wait: memory of running work counts as used.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn of(device: &Device) -> candle_core::Result<Option<Self>> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let [free, total] = s2o_cuda::free_and_total(device)?;
            return Ok(Some(Self { free, total }));
        }
        let _ = device;
        Ok(None)
    }

    /// Sets the release threshold of Candle's pool on a GPU to unlimited, so freed memory is reused instead of being
    /// returned at each synchronisation. Other processes see it as used. Does nothing on other devices.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn keep_released(device: &Device) -> candle_core::Result<()> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            s2o_cuda::keep_released(device)?;
        }
        let _ = device;
        Ok(())
    }
}

/// Whether an error of Candle, of the attention ops or of a matrix product means that a GPU has no memory left.
pub fn is_out_of_memory(error: &Error) -> bool {
    // Candle keeps only the text of a foreign error.
    let words = error.to_string();
    ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|name| words.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_no_memory_of_its_own() {
        assert_eq!(DeviceMemory::of(&Device::Cpu).unwrap(), None);
    }

    #[test]
    fn running_out_is_told_from_other_failures() {
        let full = Error::wrap("allocating scratch memory: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        assert!(is_out_of_memory(&full));
        assert!(is_out_of_memory(&full.context("in layer 3")));
        assert!(!is_out_of_memory(&Error::Msg("no more".to_owned())));
    }
}
