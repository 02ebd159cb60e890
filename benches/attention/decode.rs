//! Dense attention of one query on an NVIDIA GPU: the decode kernel against the split kernel, whose tiles have 128
//! query rows. 32 query and 8 KV heads of 128, bf16.

use std::time::Instant;

use anyhow::Result;
use candle_core::{D, Tensor};
use candle_s2o::cuda::{KernelTime, dense_attn_split, dense_attn_timed};
use candle_s2o::{Mask, dense_attn};
use s2o_eval::capture::LayerTensors;

use crate::measure::gpu::Gpu;
use crate::measure::{Machine, Place, Row, agree, median};

const LENGTHS: [usize; 3] = [4 << 10, 32 << 10, 128 << 10];
const HEADS: [usize; 2] = [32, 8];
/// Keys and values of several layers, more than an L2 cache holds: a decoder reads those of every layer once per token.
const COLD_BYTES: usize = 512 << 20;
/// Calls of one measurement, so that the host's time to launch them is hidden.
const CALLS: usize = 50;

/// Times every length and appends the rows.
pub fn run(tokens: &[usize], repeats: usize, place: &Place) -> Result<()> {
    let gpu = Gpu::new()?;
    let machine = gpu.machine()?;
    println!("{}", machine.device());
    let lengths = if tokens.is_empty() { LENGTHS.to_vec() } else { tokens.to_vec() };
    let rows =
        lengths.into_iter().map(|tokens| compare(&gpu, &machine, tokens, repeats)).collect::<Result<Vec<_>>>()?;
    machine.append(&rows, place)?;
    Ok(())
}

fn decode(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors) -> Result<Tensor> {
    Ok(dense_attn(q, k, v, *softmax_scale, Mask::Causal)?)
}

/// The heads of a group as the rows of one tile, in as many parts as fill 132 multiprocessors twice.
fn split(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors) -> Result<Tensor> {
    let [heads, kv_heads] = HEADS;
    let rows = q.reshape((kv_heads, heads / kv_heads, 1, q.dim(D::Minus1)?))?;
    let groups = |x: &Tensor| x.squeeze(0)?.transpose(0, 1)?.unsqueeze(2);
    let parts = (2 * 132 / kv_heads).min(k.dim(1)? / 512);
    let out = dense_attn_split(&rows, &groups(k)?, &groups(v)?, *softmax_scale, Mask::Full, parts.max(1))?;
    Ok(out.reshape(q.dims())?)
}

fn compare(gpu: &Gpu, machine: &Machine, tokens: usize, repeats: usize) -> Result<Row> {
    let [heads, kv_heads] = HEADS;
    let bytes = 2 * tokens * kv_heads * 128 * 2;
    let layers = (0..COLD_BYTES.div_ceil(bytes))
        .map(|_| {
            let layer = gpu.random(tokens, heads, kv_heads)?;
            Ok(LayerTensors { q: layer.q.narrow(1, 0, 1)?.contiguous()?, ..layer })
        })
        .collect::<Result<Vec<_>>>()?;
    for layer in &layers {
        agree("the decode kernel", &decode(layer)?, &split(layer)?, 1e-2)?;
    }
    // [decode, split] by [events, clock]
    let mut times: [[Vec<f64>; 2]; 2] = Default::default();
    for round in 0..=repeats {
        for (of, times) in [decode, split].into_iter().zip(&mut times) {
            let [events, clock] = time(gpu, &layers, of)?;
            if round > 0 {
                times[0].push(events);
                times[1].push(clock);
            }
        }
    }
    let medians = times.map(|times| times.map(median));
    for (name, [events, clock]) in ["decode", "split"].into_iter().zip(medians) {
        let rate = bytes as f64 / events / 1e9;
        println!(
            "{tokens:7} {name:7} {:8.1} us by events, {:8.1} by the clock, {rate:.2} TB/s",
            events * 1e3,
            clock * 1e3
        );
    }
    let kernels = dense_attn_timed(&layers[0].q, &layers[0].k, &layers[0].v, layers[0].softmax_scale, Mask::Causal)?.1;
    for KernelTime { kernel, ms } in kernels {
        println!("{tokens:7} kernel {kernel:7} {:8.1} us, alone between two events", ms * 1e3);
    }
    let row = machine.row("attention decode", "decode, random", &layers[0].q, &layers[0].k)?;
    Ok(row.against("split kernel", medians[0][0], medians[1][0]))
}

/// Milliseconds of a call by events and by the clock, as the mean of [`CALLS`] calls.
fn time(gpu: &Gpu, layers: &[LayerTensors], of: fn(&LayerTensors) -> Result<Tensor>) -> Result<[f64; 2]> {
    gpu.device.synchronize()?;
    let start = Instant::now();
    let events = gpu.time(&mut || (0..CALLS).try_for_each(|i| of(&layers[i % layers.len()]).map(drop)))?;
    gpu.device.synchronize()?;
    Ok([events, start.elapsed().as_secs_f64() * 1e3].map(|ms| ms / CALLS as f64))
}
