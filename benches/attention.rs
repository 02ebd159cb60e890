//! Attention alone: dense against Candle's CPU flash attention, and S2O against our dense on tensors of needle-7m.
//!
//! ```text
//! cargo bench --bench attention                      # everything that fits a laptop
//! cargo bench --bench attention -- s2o --tokens 32768
//! ```

#[allow(dead_code, reason = "only the thread limit is needed")]
#[path = "../examples/cli/machine.rs"]
mod machine;
mod measure;

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_s2o::{Attention, PrefillCall, S2oConfig, dense_attn, s2o_attn_with_stats};
use clap::{Parser, ValueEnum};
use measure::{Machine, Row, agree, causal_tflop, pair};
use s2o_models::{LoadOptions, ModelSource, PrefillOptions, passkey};
use std::num::NonZeroUsize;
use std::sync::Mutex;

/// Times attention and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to time; everything if absent.
    what: Option<What>,
    /// Prompt lengths in tokens for `s2o` and `break-even`.
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Layers of needle-7m whose tensors are used.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3,4,5")]
    layers: Vec<usize>,
    /// Worker threads.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
    /// Timed runs of each side.
    #[arg(long, default_value = "3")]
    repeats: NonZeroUsize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
enum What {
    /// Our dense attention against Candle's at 8K.
    Dense,
    /// S2O against our dense on needle-7m's tensors.
    S2o,
    /// S2O against our dense on short prompts: where does it begin to pay?
    BreakEven,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // Candle has a pool of its own beside rayon's: both sides must get the same threads.
    machine::limit_threads(Some(arguments.threads));
    let machine = Machine::here();
    println!("{}", machine.device());
    let wanted = |what| arguments.what.is_none_or(|only| only == what);
    let mut rows = Vec::new();
    if wanted(What::Dense) {
        rows.push(dense(&machine, &arguments)?);
    }
    let lengths = |default: &[usize]| {
        if arguments.tokens.is_empty() { default.to_vec() } else { arguments.tokens.clone() }
    };
    if wanted(What::S2o) {
        for tokens in lengths(&[16 << 10, 32 << 10]) {
            rows.extend(s2o(&machine, &arguments, "s2o", tokens)?);
        }
    }
    if wanted(What::BreakEven) {
        for tokens in lengths(&[512, 768, 1024, 1536, 2048, 3072, 4096]) {
            rows.extend(s2o(&machine, &arguments, "break-even", tokens)?);
        }
    }
    println!("{}", machine.append(&rows)?.display());
    Ok(())
}

fn dense(machine: &Machine, arguments: &Arguments) -> Result<Row> {
    let (len, heads, kv_heads, head_dim) = (8192, 4, 2, 128);
    let random = |heads| Tensor::randn(0f32, 1.0, (1, len, heads, head_dim), &Device::Cpu);
    let (q, k, v) = (random(heads)?, random(kv_heads)?, random(kv_heads)?);
    let scale = (head_dim as f32).sqrt().recip();
    let ours = || dense_attn(&q, &k, &v, scale, true);
    let candle = || flash_attn::<f32>(&q, &k, &v, scale, AttnMask::causal_with_offset(0), None, None);
    agree("dense", &ours()?, &candle()?.transpose(1, 2)?, 1e-5)?;
    let (ms, baseline_ms) = pair(arguments.repeats.get(), || Ok(ours().map(drop)?), || Ok(candle().map(drop)?))?;
    let row = Row {
        ms,
        tflops: Some(causal_tflop(&q, &k)? / ms * 1e3),
        baseline: "candle_nn::attention::flash_attn".into(),
        baseline_ms: Some(baseline_ms),
        ratio: Some(baseline_ms / ms),
        density: Some(1.0),
        ..machine.row("dense", "dense", &q, &k)?
    };
    println!("dense   8192 tokens  {ms:9.1} ms, Candle {baseline_ms:9.1} ms: {:.1}x", baseline_ms / ms);
    Ok(row)
}

fn s2o(machine: &Machine, arguments: &Arguments, bench: &str, tokens: usize) -> Result<Vec<Row>> {
    let config = S2oConfig::builder().dense_below(0).build()?;
    let mut rows = Vec::new();
    let mut sums = (0.0, 0.0, 0.0);
    for (layer, [q, k, v], scale) in captured(tokens, &arguments.layers)? {
        let never_stops = config.to_builder().tau(0.0).build()?;
        let exact = dense_attn(&q, &k, &v, scale, true)?;
        agree("S2O that never stops", &s2o_attn_with_stats(&q, &k, &v, scale, &never_stops)?.0, &exact, 1e-5)?;
        let (out, stats) = s2o_attn_with_stats(&q, &k, &v, scale, &config)?;
        agree("S2O", &out, &exact, 0.5)?;
        let (ms, baseline_ms) = pair(
            arguments.repeats.get(),
            || Ok(s2o_attn_with_stats(&q, &k, &v, scale, &config).map(drop)?),
            || Ok(dense_attn(&q, &k, &v, scale, true).map(drop)?),
        )?;
        let (density, ratio) = (stats.density(), baseline_ms / ms);
        println!(
            "{bench} {tokens:6} tokens layer {layer}  S2O {ms:9.1} ms, dense {baseline_ms:9.1} ms: {ratio:5.2}x at density {density:.3}, {:.2} of 1/density",
            ratio * density
        );
        sums = (sums.0 + ms, sums.1 + baseline_ms, sums.2 + density);
        rows.push(Row {
            segment: config.segment_len().resolve(tokens).to_string(),
            tau: Some(config.tau()),
            density: Some(density),
            ms,
            tflops: Some(density * causal_tflop(&q, &k)? / ms * 1e3),
            baseline: "dense_attn".into(),
            baseline_ms: Some(baseline_ms),
            ratio: Some(ratio),
            ..machine.row(bench, &format!("s2o needle-7m layer {layer}"), &q, &k)?
        });
    }
    let (ratio, density) = (sums.1 / sums.0, sums.2 / rows.len() as f64);
    println!(
        "{bench} {tokens:6} tokens all layers {ratio:5.2}x at density {density:.3}, {:.2} of 1/density",
        ratio * density
    );
    Ok(rows)
}

/// Post-RoPE q, k, v of the layers of needle-7m on a passkey prompt, and the softmax scale.
fn captured(tokens: usize, layers: &[usize]) -> Result<Vec<(usize, [Tensor; 3], f32)>> {
    let model = ModelSource::Needle7m.load(&LoadOptions::default(), None)?;
    let prompt = passkey::build(&model.tokenizer, tokens, 0.5, 0)?;
    let mut cache = model.decoder.new_cache(1, prompt.tokens.len())?;
    let capture = Capture { layers: layers.to_vec(), taken: Mutex::default() };
    model.decoder.prefill(&model.prompt(&prompt.tokens)?, &mut cache, &capture, PrefillOptions::new())?;
    Ok(capture.taken.into_inner().expect("no thread panicked"))
}

/// Dense attention that keeps a copy of what it is given.
#[derive(Debug)]
struct Capture {
    layers: Vec<usize>,
    taken: Mutex<Vec<(usize, [Tensor; 3], f32)>>,
}

impl Attention for Capture {
    fn name(&self) -> &str {
        "capture"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        if self.layers.contains(&call.layer) {
            let copy = |t: &Tensor| t.contiguous()?.copy();
            self.taken.lock().expect("no thread panicked").push((
                call.layer,
                [copy(q)?, copy(k)?, copy(v)?],
                call.softmax_scale,
            ));
        }
        candle_s2o::Dense.prefill(call, q, k, v)
    }
}
