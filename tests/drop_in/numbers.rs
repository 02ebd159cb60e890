//! Tensors whose numbers depend on a seed alone.

use candle_core::{DType, Device, Tensor};

/// A bell-like shape from four uniform draws, variance about 1.
pub fn tensor(seed: u64, dims: &[usize], dtype: DType, device: &Device) -> Tensor {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let values: Vec<f32> = (0..dims.iter().product()).map(|_| (draw() + draw() + draw() + draw()) * 1.7).collect();
    let exact = Tensor::from_vec(values, dims, &Device::Cpu).expect("as many numbers as elements");
    exact.to_dtype(dtype).and_then(|t| t.to_device(device)).expect("copied")
}

/// ALiBi's slopes for this many heads.
pub fn slopes(num_heads: usize, device: &Device) -> Tensor {
    let slopes: Vec<f32> = (1..=num_heads).map(|head| (-8.0 * head as f32 / num_heads as f32).exp2()).collect();
    Tensor::new(slopes, device).expect("copied")
}
