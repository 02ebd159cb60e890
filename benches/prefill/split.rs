//! Parts of the time of a prefill, from separate runs that do not disturb the timed runs.
//!
//! Attention is the time between two events around each call of the attention method, and ranking is the sum of its
//! kernels. Linear layers are fused with other operations, so their matrix products are timed alone.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_s2o::{Attention, PrefillCall, S2o};
use cudarc::driver::CudaEvent;
use s2o_models::fused::{Linear, RotatedInt8, Rows};
use s2o_models::{DecoderConfig, LinearPrecision};

use crate::checkpoint::DTYPE;
use crate::measure::gpu::Gpu;

/// Milliseconds of one prefill on the GPU.
#[derive(Debug, Clone, Copy)]
pub struct Split {
    /// Time from the first kernel to the last.
    pub total: f64,
    /// Time in attention, ranking included.
    pub attention: f64,
    /// Time in the ranking of S2O; 0 for other methods.
    pub ranking: f64,
    /// Share of the attention calls before which the GPU had nothing left to do: the host was too slow for it.
    pub idle: f64,
}

/// Attention that is timed with events.
#[derive(Debug)]
pub struct Watched<'a> {
    inner: &'a dyn Attention,
    gpu: &'a Gpu,
    calls: Mutex<Vec<(CudaEvent, CudaEvent)>>,
    longest: Mutex<usize>,
    idle: Mutex<usize>,
}

impl<'a> Watched<'a> {
    pub fn new(inner: &'a dyn Attention, gpu: &'a Gpu) -> Self {
        Self { inner, gpu, calls: Mutex::default(), longest: Mutex::default(), idle: Mutex::default() }
    }

    /// Share of the calls so far that found the GPU without work.
    pub fn idle(&self) -> f64 {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).len();
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) as f64 / calls.max(1) as f64
    }

    /// Milliseconds of all calls so far.
    pub fn ms(&self) -> Result<f64> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let times = calls.iter().map(|(begin, end)| Ok(f64::from(begin.elapsed_ms(end)?)));
        Ok(times.collect::<Result<Vec<_>>>()?.iter().sum())
    }

    /// The largest number of queries of a call, which is the chunk size.
    pub fn chunk(&self) -> usize {
        *self.longest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attention for Watched<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let failed = |error: anyhow::Error| candle_core::Error::msg(error.to_string());
        if self.gpu.is_idle().map_err(failed)? {
            *self.idle.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
        let mark = || self.gpu.mark().map_err(failed);
        let begin = mark()?;
        let out = self.inner.prefill(call, q, k, v)?;
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push((begin, mark()?));
        let mut longest = self.longest.lock().unwrap_or_else(PoisonError::into_inner);
        *longest = longest.max(q.dim(1)?);
        Ok(out)
    }

    fn independent_queries(&self, call: &PrefillCall) -> usize {
        self.inner.independent_queries(call)
    }
}

/// S2O that sums the time of its ranking kernels. The host waits at each call.
#[derive(Debug)]
pub struct Ranked {
    s2o: S2o,
    ranking_ms: Mutex<f64>,
}

impl Ranked {
    pub fn new(s2o: S2o) -> Self {
        Self { s2o, ranking_ms: Mutex::default() }
    }

    /// Milliseconds of all rankings so far.
    pub fn ranking_ms(&self) -> f64 {
        *self.ranking_ms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attention for Ranked {
    fn name(&self) -> &str {
        "s2o, timed"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let op = self.s2o.op(call).map_err(candle_core::Error::wrap)?;
        let (out, kernels) = op.apply_timed(q, k, v)?;
        let ms: f64 = kernels.iter().filter(|kernel| kernel.ranks()).map(|kernel| kernel.ms).sum();
        *self.ranking_ms.lock().unwrap_or_else(PoisonError::into_inner) += ms;
        Ok(out)
    }
}

/// Only the matrix products of all layers on `tokens` tokens, `chunk` at a time: milliseconds, and 1e12 FLOP.
pub fn linear_alone(
    gpu: &Gpu,
    config: &DecoderConfig,
    precision: LinearPrecision,
    tokens: usize,
    chunk: usize,
) -> Result<(f64, f64)> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q_size, kv_size) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let sizes = [
        (hidden, q_size),
        (hidden, kv_size),
        (hidden, kv_size),
        (q_size, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ];
    let random = |rows: usize, columns: usize, device: &Device| -> Result<Tensor> {
        Ok(Tensor::randn(0f32, (columns as f32).sqrt().recip(), (rows, columns), device)?.to_dtype(DTYPE)?)
    };
    // The weights of two layers alternate, so that none is in the cache.
    let weight = |&(from, to): &(usize, usize)| -> Result<Linear> {
        let linear = candle_nn::Linear::new(random(to, from, &gpu.device)?, None);
        Ok(Linear::Dense(linear).in_precision(precision)?)
    };
    let layers: Result<Vec<Vec<Linear>>> = (0..2).map(|_| sizes.iter().map(weight).collect()).collect();
    let layers = layers?;
    let chunk = chunk.min(tokens);
    let input = |size: usize| -> Result<(usize, Rows)> {
        let x = random(chunk, size, &gpu.device)?;
        let rows = if precision == LinearPrecision::Int8 { Rows::Int8(RotatedInt8::quantise(&x)?) } else { x.into() };
        Ok((size, rows))
    };
    let inputs = [hidden, q_size, inner].into_iter().map(input).collect::<Result<Vec<_>>>()?;
    let layer = |index: usize, rows: usize| -> Result<()> {
        for (&(from, _), weight) in sizes.iter().zip(&layers[index % 2]) {
            let (_, input) = inputs.iter().find(|(size, _)| *size == from).expect("an input for each width");
            weight.forward_rows(&input.narrow(0, rows)?)?;
        }
        Ok(())
    };
    layer(0, chunk)?;
    let ms = gpu.time(&mut || {
        for start in (0..tokens).step_by(chunk) {
            (0..config.num_layers).try_for_each(|index| layer(index, chunk.min(tokens - start)))?;
        }
        Ok(())
    })?;
    let multiplied: usize = sizes.iter().map(|(from, to)| from * to).sum();
    Ok((ms, 2.0 * (multiplied * config.num_layers) as f64 * tokens as f64 / 1e12))
}
