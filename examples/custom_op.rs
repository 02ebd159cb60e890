//! `S2oOp` as a `CustomOp3` of Candle, on CPU and CUDA tensors.
//!
//! ```text
//! cargo run --release --example custom_op
//! ```

use candle_core::{DType, Device, Tensor};
use candle_s2o::{S2oConfig, S2oOp, s2o_attn};

fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available(0)?;
    // bf16 on a GPU, whose kernels take no f32.
    let dtype = device.bf16_default_to_f32();
    let q = Tensor::randn(2f32, 1f32, (1, 4096, 4, 64), &device)?.to_dtype(dtype)?;
    let k = Tensor::randn(0f32, 1f32, (1, 4096, 2, 64), &device)?.to_dtype(dtype)?;
    let v = Tensor::randn(0f32, 1f32, (1, 4096, 2, 64), &device)?.to_dtype(dtype)?;
    let softmax_scale = 1.0 / 64f32.sqrt();
    let config = S2oConfig::default();

    let out = q.apply_op3(&k, &v, S2oOp::new(softmax_scale, config.clone()))?;
    println!("output {:?}", out.shape());

    // The function `s2o_attn` makes the same call.
    let expected = s2o_attn(&q, &k, &v, softmax_scale, &config)?;
    let difference = (&out - &expected)?.abs()?.max_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    println!("largest difference from s2o_attn: {difference}");

    // Wrong shapes are an error.
    let wide = Tensor::zeros((1, 4096, 2, 96), q.dtype(), &device)?;
    let error = q.apply_op3(&wide, &wide, S2oOp::new(softmax_scale, config)).expect_err("another head dimension");
    println!("wrong keys: {}", error.to_string().lines().next().unwrap_or_default());
    Ok(())
}
