//! Tensors whose numbers depend only on a seed.

use candle_core::{DType, Device, Tensor};

/// [`s2o_testkit::tensor`] on `device`.
pub fn tensor(seed: u64, dims: &[usize], dtype: DType, device: &Device) -> Tensor {
    s2o_testkit::tensor(dims, seed, dtype).to_device(device).expect("copied")
}

/// ALiBi's slopes for this many heads.
pub fn slopes(num_heads: usize, device: &Device) -> Tensor {
    let slopes: Vec<f32> = (1..=num_heads).map(|head| (-8.0 * head as f32 / num_heads as f32).exp2()).collect();
    Tensor::new(slopes, device).expect("copied")
}
