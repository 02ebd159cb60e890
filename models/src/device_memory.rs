//! [`DeviceMemory`]: how much memory a GPU has left, and whether an error says that it has too little.

use candle_core::{Device, Error, Result};

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// What allocations through Candle can still get: what the driver has left, and what its pools hold unused.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

impl DeviceMemory {
    /// Asks the driver; `None` for a device that is not an NVIDIA GPU. Does not wait for work under way, whose memory
    /// counts as used.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn of(device: &Device) -> Result<Option<Self>> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let [free, total] = s2o_cuda::free_and_total(device)?;
            return Ok(Some(Self { free, total }));
        }
        let _ = device;
        Ok(None)
    }

    /// Lets the allocations of this process on a GPU keep memory that is released, for the next ones; else the driver
    /// takes it back whenever the host waits, and what comes next waits until it is mapped again. Other processes see
    /// it as used. Nothing on a device that is not an NVIDIA GPU.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn keep_released(device: &Device) -> Result<()> {
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
    // Candle keeps of an error from elsewhere only its words.
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
