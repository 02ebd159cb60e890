//! On the CPU: our dense attention against Candle's flash attention, and S2O against dense on tensors of needle-7m.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_s2o::{Mask, S2oConfig, dense_attn, s2o_attn_with_stats};
use s2o_eval::capture::LayerTensors;

use crate::measure::{Machine, Row, agree, causal_tflop, pair, relative_error};
use crate::tensors::captured;

/// Our dense attention against Candle's at 8K.
pub fn dense(machine: &Machine, repeats: usize) -> Result<Row> {
    let (len, heads, kv_heads, head_dim) = (8192, 4, 2, 128);
    let random = |heads| Tensor::randn(0f32, 1.0, (1, len, heads, head_dim), &Device::Cpu);
    let (q, k, v) = (random(heads)?, random(kv_heads)?, random(kv_heads)?);
    let scale = (head_dim as f32).sqrt().recip();
    let ours = || dense_attn(&q, &k, &v, scale, Mask::Causal);
    let candle = || flash_attn::<f32>(&q, &k, &v, scale, AttnMask::causal_with_offset(0), None, None);
    agree("dense", &ours()?, &candle()?.transpose(1, 2)?, 1e-5)?;
    let (ms, baseline_ms) = pair(repeats, || Ok(ours().map(drop)?), || Ok(candle().map(drop)?))?;
    println!("dense   8192 tokens  {ms:9.1} ms, Candle {baseline_ms:9.1} ms: {:.1}x", baseline_ms / ms);
    let tflops = Some(causal_tflop(&q, &k)? / ms * 1e3);
    let row = Row { tflops, density: Some(1.0), ..machine.row("dense", "dense", &q, &k)? };
    Ok(row.against("candle_nn::attention::flash_attn", ms, baseline_ms))
}

/// S2O against our dense, layer by layer.
pub fn s2o(machine: &Machine, repeats: usize, layers: &[usize], bench: &str, tokens: usize) -> Result<Vec<Row>> {
    let config = S2oConfig::builder().dense_below(0).build()?;
    let mut rows = Vec::new();
    let mut sums = (0.0, 0.0, 0.0);
    for LayerTensors { layer, q, k, v, softmax_scale: scale } in captured(tokens, layers, &Device::Cpu)? {
        let never_stops = config.to_builder().tau(0.0).build()?;
        let exact = dense_attn(&q, &k, &v, scale, Mask::Causal)?;
        agree("S2O that never stops", &s2o_attn_with_stats(&q, &k, &v, scale, &never_stops)?.0, &exact, 1e-5)?;
        let (out, stats) = s2o_attn_with_stats(&q, &k, &v, scale, &config)?;
        let error = relative_error(&out, &exact)?;
        ensure!(error <= 0.5, "S2O: relative error {error}: not timed");
        let (ms, baseline_ms) = pair(
            repeats,
            || Ok(s2o_attn_with_stats(&q, &k, &v, scale, &config).map(drop)?),
            || Ok(dense_attn(&q, &k, &v, scale, Mask::Causal).map(drop)?),
        )?;
        let (density, ratio) = (stats.density(), baseline_ms / ms);
        println!(
            "{bench} {tokens:6} tokens layer {layer}  S2O {ms:9.1} ms, dense {baseline_ms:9.1} ms: {ratio:5.2}x \
             at density {density:.3}, error {error:.4}, {:.2} of 1/density",
            ratio * density
        );
        sums = (sums.0 + ms, sums.1 + baseline_ms, sums.2 + density);
        let row = Row {
            segment: config.segment_len().resolve(tokens).to_string(),
            tau: Some(config.tau().resolve(tokens)),
            density: Some(density),
            error: Some(error),
            tflops: Some(density * causal_tflop(&q, &k)? / ms * 1e3),
            ..machine.row(bench, &format!("s2o needle-7m layer {layer}"), &q, &k)?
        };
        rows.push(row.against("dense_attn", ms, baseline_ms));
    }
    let (ratio, density) = (sums.1 / sums.0, sums.2 / rows.len() as f64);
    println!(
        "{bench} {tokens:6} tokens all layers {ratio:5.2}x at density {density:.3}, {:.2} of 1/density",
        ratio * density
    );
    Ok(rows)
}
