//! [`break_even`]: the prompt length from which S2O is faster than dense attention.

use candle_core::Device;
use s2o_core::S2oConfig;

/// Measured on an H200 (docs/kernels.md).
pub(crate) const GPU_BREAK_EVEN: usize = 8192;

/// Prompt length in tokens from which S2O is faster than dense attention on a device ([`DenseBelow::Auto`]).
///
/// [`DenseBelow::Auto`]: crate::DenseBelow::Auto
pub fn break_even(device: &Device) -> usize {
    match device {
        Device::Cuda(_) => GPU_BREAK_EVEN,
        _ => S2oConfig::CPU_BREAK_EVEN,
    }
}
