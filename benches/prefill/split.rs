//! Parts of the time of a prefill, from separate runs that do not disturb the timed runs.
//!
//! Attention is the time between two events around each call of the attention method, and ranking is the sum of its
//! kernels. Linear layers are fused with other operations, so their matrix products are timed alone.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_s2o::{Attention, PrefillCall, S2o};
use cudarc::driver::CudaEvent;
use s2o_models::fused::{GatedLinear, Linear, RotatedInt8, Rows, StackedLinear};
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

/// The linear layers of a decoder layer, with the gate of its MLP.
struct Products {
    qkv: StackedLinear,
    output: Linear,
    gate_up: GatedLinear,
    down: Linear,
}

impl Products {
    fn random(gpu: &Gpu, config: &DecoderConfig, precision: LinearPrecision) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
        let linear = |from: usize, to: usize| -> Result<Linear> {
            Ok(Linear::Dense(candle_nn::Linear::new(random(to, from, &gpu.device)?, None)))
        };
        let qkv = vec![linear(hidden, q)?, linear(hidden, kv)?, linear(hidden, kv)?];
        Ok(Self {
            qkv: StackedLinear::new(qkv)?.in_precision(precision)?,
            output: linear(q, hidden)?.in_precision(precision)?,
            gate_up: GatedLinear::new(linear(hidden, inner)?, linear(hidden, inner)?, precision)?,
            down: linear(inner, hidden)?.in_precision(precision)?,
        })
    }

    /// The products for `inputs` of widths hidden, queries and inner.
    fn run(&self, [hidden, q, inner]: &[Rows; 3]) -> Result<()> {
        self.qkv.forward(hidden)?;
        self.output.forward_rows(q)?;
        self.gate_up.forward(hidden)?;
        self.down.forward_rows(inner)?;
        Ok(())
    }
}

fn random(rows: usize, columns: usize, device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(0f32, (columns as f32).sqrt().recip(), (rows, columns), device)?.to_dtype(DTYPE)?)
}

/// Only the linear layers on `tokens` tokens, `chunk` at a time: milliseconds, and 1e12 FLOP. Of the last layer only q, k and
/// v, as in a prefill whose attention allows it ([`Attention::independent_queries`]).
pub fn linear_alone(
    gpu: &Gpu,
    config: &DecoderConfig,
    precision: LinearPrecision,
    tokens: usize,
    chunk: usize,
) -> Result<(f64, f64)> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
    // The weights of two layers alternate, so that none is in the cache.
    let layers = [Products::random(gpu, config, precision)?, Products::random(gpu, config, precision)?];
    let chunk = chunk.min(tokens);
    let inputs = [hidden, q, inner].map(|size| -> Result<Rows> {
        let x = random(chunk, size, &gpu.device)?;
        Ok(if precision == LinearPrecision::Int8 { Rows::Int8(RotatedInt8::quantise(&x)?) } else { x.into() })
    });
    let [of_hidden, of_q, of_inner] = inputs;
    let inputs = [of_hidden?, of_q?, of_inner?];
    let last = config.num_layers - 1;
    let part = |rows: usize| -> Result<()> {
        let [of_hidden, of_q, of_inner] = inputs.each_ref().map(|input| input.narrow(0, rows));
        let inputs = [of_hidden?, of_q?, of_inner?];
        (0..last).try_for_each(|index| layers[index % 2].run(&inputs))?;
        layers[last % 2].qkv.forward(&inputs[0])?;
        Ok(())
    };
    layers[0].run(&inputs)?;
    let ms = gpu.time(&mut || (0..tokens).step_by(chunk).try_for_each(|start| part(chunk.min(tokens - start))))?;
    let of_qkv = hidden * (q + 2 * kv);
    let multiplied = (of_qkv + q * hidden + 3 * hidden * inner) * last + of_qkv;
    Ok((ms, 2.0 * multiplied as f64 * tokens as f64 / 1e12))
}
