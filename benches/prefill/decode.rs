//! Decoding after a prompt: the time of a token, and the time that memory takes for weights, keys and values.

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_s2o::{Attention, S2o};
use s2o_models::fused::Int8Rows;
use s2o_models::{Decoder, GenerationOptions, KvStorage, LinearPrecision, PrefillOptions, TokenStream};

use crate::checkpoint::DTYPE;
use crate::measure::gpu::Gpu;
use crate::measure::median;

/// Milliseconds of one token.
#[derive(Debug, Clone, Copy)]
pub struct Decoded {
    /// From the request of a token to its id on the host.
    pub token: f64,
    /// Without waiting for the ids: the larger of the times of GPU and host.
    pub enqueued: f64,
    /// Bytes that a token reads, at the rate of a copy.
    pub bound: f64,
}

/// Decodes `count` tokens after a prompt `(1, len)`, twice. `linear` is the precision of the decoder's linear layers.
pub fn decode(
    gpu: &Gpu,
    decoder: &Decoder,
    linear: LinearPrecision,
    kv: KvStorage,
    prompt: &Tensor,
    count: usize,
) -> Result<Decoded> {
    ensure!(count > 1, "--decode: expected at least 2 tokens, got {count}");
    let len = prompt.dim(1)?;
    let mut cache = decoder.new_cache_in(kv, 1, len + 2 * count)?;
    let s2o = S2o::new(candle_s2o::S2oConfig::default());
    let out = decoder.prefill(prompt, &mut cache, &s2o as &dyn Attention, PrefillOptions::new().chunk(16384))?;
    let options = GenerationOptions { max_new_tokens: count, ..GenerationOptions::default() };
    let mut stream = TokenStream::new(decoder, &mut cache, &out.last_logits()?, &[], &[], &options)?;
    let (mut times, mut token) = (Vec::new(), 0);
    loop {
        let start = Instant::now();
        let Some(next) = stream.next() else { break };
        token = next?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    // The first token needs no forward pass.
    times.remove(0);
    let total = gpu.time(&mut || {
        for _ in 0..count {
            decoder.decode_ids(&[token], &mut cache)?;
        }
        Ok(())
    })?;
    let bound = bytes(decoder, linear, kv, len) / copy_rate(gpu)? * 1e3;
    Ok(Decoded { token: median(times), enqueued: total / count as f64, bound })
}

/// Bytes that a token reads after `len` positions: weights, keys and values.
fn bytes(decoder: &Decoder, linear: LinearPrecision, kv: KvStorage, len: usize) -> f64 {
    let (config, wide) = (decoder.config(), DTYPE.size_in_bytes());
    let head = config.vocab_size * config.hidden_size;
    let embeddings = if config.tie_embeddings { head } else { 2 * head };
    let of_layers = config.num_parameters() - embeddings;
    let of_linear = if linear == LinearPrecision::Int8 { 1 } else { wide };
    let row = match kv {
        KvStorage::AsComputed | KvStorage::Host => config.head_dim * wide,
        KvStorage::Int8 => Int8Rows::row_bytes(config.head_dim),
    };
    let cache = 2 * config.num_layers * config.num_kv_heads * row * len;
    (of_layers * of_linear + head * wide + cache) as f64
}

/// Bytes per second that a copy reads and writes.
fn copy_rate(gpu: &Gpu) -> Result<f64> {
    const BYTES: usize = 1 << 30;
    let memory = Tensor::zeros(BYTES, DType::U8, &gpu.device)?;
    let ms = gpu.medians(
        9,
        &mut [&mut || {
            memory.copy()?;
            Ok(())
        }],
    )?[0];
    Ok(2.0 * BYTES as f64 / ms * 1e3)
}
