//! S2O sparse attention on tensors: its density, and the error of its output relative to dense attention.
//!
//! ```text
//! cargo run --release --example attend
//! ```

use candle_core::{DType, Device, Tensor};
use candle_s2o::{Mask, S2oConfig, dense_attn, s2o_attn_with_stats};

fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available(0)?;
    // bf16 on a GPU, whose kernels take no f32.
    let dtype = device.bf16_default_to_f32();
    // (batch, length, heads, head_dim), as in candle-flash-attn; tensors (batch, heads, length, head_dim) need a
    // `transpose(1, 2)` first. Each KV head serves two query heads. The queries share a mean, as in trained models: some
    // keys matter to all of them, and S2O ranks those first.
    let q = Tensor::randn(2f32, 1f32, (1, 8192, 4, 64), &device)?.to_dtype(dtype)?;
    let k = Tensor::randn(0f32, 1f32, (1, 8192, 2, 64), &device)?.to_dtype(dtype)?;
    let v = Tensor::randn(0f32, 1f32, (1, 8192, 2, 64), &device)?.to_dtype(dtype)?;
    let softmax_scale = 1.0 / 64f32.sqrt();

    let dense = dense_attn(&q, &k, &v, softmax_scale, Mask::Causal)?.to_dtype(DType::F32)?;
    for tau in [0.005, 0.02, 0.1] {
        // Larger thresholds stop earlier.
        let config = S2oConfig::default().to_builder().tau(tau).build()?;
        let (sparse, stats) = s2o_attn_with_stats(&q, &k, &v, softmax_scale, &config)?;
        let error = (sparse.to_dtype(DType::F32)? - &dense)?.abs()?.sum_all()?.to_scalar::<f32>()?;
        let relative = error / dense.abs()?.sum_all()?.to_scalar::<f32>()?;
        println!("tau {tau}: density {:.3}, relative L1 error {relative:.4}", stats.density());
    }
    Ok(())
}
