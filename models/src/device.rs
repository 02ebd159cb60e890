//! [`gpu`]: a GPU by its number.

use candle_core::{Device, Error};

use crate::error::{ModelError, Result};

/// GPU number `ordinal` of this machine, with one stream of its own. So a model can be loaded, used and dropped by
/// different threads, and NCCL can use the stream. `Device::new_cuda` has a stream for each thread instead, and nothing
/// orders the work of one thread after that of another. All work must come from this device and its clones.
///
/// # Errors
/// [`ModelError::NoGpu`] if this build lacks the feature `cuda`, or the driver fails or has no such GPU.
pub fn gpu(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal).map_err(|error| no_gpu(ordinal, &error))?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = &device {
        // SAFETY: all memory of the device is used on its one stream, so no stream has to wait for another.
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}

/// Number of GPUs of this machine.
///
/// # Errors
/// [`ModelError::NoGpu`] if the driver fails.
#[cfg(feature = "cuda")]
pub fn gpu_count() -> Result<usize> {
    let count = cudarc::driver::CudaContext::device_count().map_err(|error| no_gpu(0, &Error::wrap(error)))?;
    Ok(usize::try_from(count).unwrap_or(0))
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
}
