//! GPUs: one by its number, its free memory, and the detection of out-of-memory errors.

use candle_core::{Device, Error};

use crate::error::{ModelError, Result};

/// GPU number `ordinal` of this machine.
///
/// # Errors
/// [`ModelError::NoGpu`] if this build lacks the feature `cuda`, or the driver fails or has no such GPU.
pub fn gpu(ordinal: usize) -> Result<Device> {
    Device::new_cuda(ordinal).map_err(|error| no_gpu(ordinal, &error))
}

fn no_gpu(ordinal: usize, error: &Error) -> ModelError {
    // Only the first line: users do not need the backtrace.
    let words = error.to_string().lines().next().unwrap_or_default().to_owned();
    let way_out = match words.as_str() {
        _ if cfg!(not(feature = "cuda")) => "build with the feature `cuda`",
        words if words.contains("INVALID_DEVICE") => "take a smaller number: `nvidia-smi -L` lists the GPUs",
        words if words.contains("NO_DEVICE") => {
            "check that `nvidia-smi` lists a GPU and CUDA_VISIBLE_DEVICES hides none"
        }
        words if words.contains("DRIVER") || words.contains("STUB_LIBRARY") => {
            "install NVIDIA's driver, or a newer one"
        }
        words if words.contains("OUT_OF_MEMORY") => "another process holds its memory: `nvidia-smi` says which",
        _ => "check that `nvidia-smi` works, or run on the CPU",
    };
    ModelError::NoGpu { ordinal, reason: words, way_out }
}

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
    fn without_a_gpu_the_error_says_what_to_do() {
        match no_gpu(
            3,
            &Error::Msg("DriverError(CUDA_ERROR_NO_DEVICE, \"no CUDA-capable device\")\nat main".to_owned()),
        ) {
            ModelError::NoGpu { ordinal: 3, reason, way_out } => {
                assert!(!reason.contains('\n') && !way_out.is_empty(), "{reason}: {way_out}");
            }
            other => panic!("{other}"),
        }
    }

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
