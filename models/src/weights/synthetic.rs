//! Random weights of any shape from a seed, for tests and benchmarks.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};

use crate::config::DecoderConfig;
use crate::error::Result;
use crate::random::SplitMix64;

/// Random f32 weights under Hugging Face names for every tensor of `config`, the same on every machine for a seed.
///
/// Matrices have standard deviation `1 / sqrt(fan_in)`, so that activations keep their size through the layers; norms
/// are near 1 and biases near 0.
///
/// # Errors
/// Candle's, when memory is short.
pub fn weights(config: &DecoderConfig, seed: u64, device: &Device) -> Result<HashMap<String, Tensor>> {
    let mut random = SplitMix64::new(seed);
    config
        .tensor_shapes()
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product();
            let (mean, deviation) = match (name.ends_with("norm.weight"), shape.as_slice()) {
                (true, _) => (1.0, 0.1),
                (false, [_]) => (0.0, 0.02),
                (false, [.., fan_in]) => (0.0, 1.0 / (*fan_in as f32).sqrt()),
                (false, []) => (0.0, 1.0),
            };
            let values: Vec<f32> = (0..count).map(|_| mean + deviation * random.normal()).collect();
            Ok((name, Tensor::from_vec(values, shape, device)?.to_dtype(DType::F32)?))
        })
        .collect()
}
