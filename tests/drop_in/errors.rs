//! Errors of calls that the GPU does not support, which say what it supports.

use candle_core::{DType, Device, Tensor};
use s2o_flash_attn::flash_attn;

use crate::Runner;

pub fn cases(runner: &mut Runner) {
    let device = runner.device.clone();
    let zeros = |dims: [usize; 4], dtype, device: &Device| Tensor::zeros(&dims[..], dtype, device).expect("zeros");
    let half = |dims| zeros(dims, DType::BF16, &device);
    let refused = |q: &Tensor, kv: &Tensor, words: &str| {
        let error = flash_attn(q, kv, kv, 0.125, true).expect_err("refused").to_string();
        assert!(error.contains(words), "expected an error with {words:?}, got {error}");
    };
    runner.case("errors f32 on the GPU", |_| {
        let wide = zeros([1, 20, 2, 64], DType::F32, &device);
        refused(&wide, &wide, "expected dtype F16 or BF16 on CUDA, got F32");
    });
    runner.case("errors head_dim above 128", |_| {
        let wide = half([1, 20, 2, 136]);
        refused(&wide, &wide, "head_dim: expected 64 or 128 on CUDA, got 136");
    });
    runner.case("errors keys on the CPU", |_| {
        let there = zeros([1, 20, 2, 64], DType::BF16, &Device::Cpu);
        refused(&half([1, 20, 2, 64]), &there, "k: expected the device of q");
    });
    runner.case("errors heads that do not divide", |_| {
        refused(&half([1, 20, 3, 64]), &half([1, 20, 2, 64]), "multiple");
    });
    runner.case("errors three dimensions", |_| {
        let flat = half([1, 20, 2, 64]).squeeze(0).expect("three dimensions");
        refused(&flat, &flat, "expected 4 dimensions");
    });
}
