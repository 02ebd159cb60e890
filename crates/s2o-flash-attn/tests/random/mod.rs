//! Inputs of the tests.

use candle_core::{DType, Device, Result, Tensor};

/// Seeded normal values: tests must not differ from run to run.
pub fn random(dims: &[usize], seed: u64, dtype: DType) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}
