//! Times Candle's own model on a published shape with weights from a seed: the policy alternating with exact attention.
//! `benches/prefill` times the same model on the same weights and prompt with the original candle-flash-attn.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use candle_core::Tensor;
use candle_flash_attn::s2o::{self, AttnStats, Policy};
use candle_s2o::Dense;
use clap::Args;
use s2o_models::{Decoder, PrefillOptions};

use crate::checkpoint::{DTYPE, Weights, checkpoint, prompt};
use crate::logits::{EXACT_WITHIN, apart, first_token};
use crate::measure::gpu::Gpu;
use crate::measure::{Place, Row, median};
use crate::stock::Stock;

/// Prompt length at which the model must agree with our decoder before anything is timed.
const CHECKED: usize = 4096;

/// Flags of the timing.
#[derive(Debug, Args)]
pub struct Timing {
    /// Time the model on this shape instead: llama-3.1-8b, llama-3.1-70b, qwen3-8b or a config.json
    #[arg(long, value_name = "SHAPE", conflicts_with_all = ["model", "prompt_file", "cpu"])]
    pub synthetic: Option<String>,
    /// Kind of weights of --synthetic
    #[arg(long, default_value = "calibrated")]
    weights: Weights,
    /// Layers to keep of the shape
    #[arg(long)]
    layers: Option<usize>,
    /// Timed runs of each policy
    #[arg(long, default_value = "3")]
    repeats: usize,
    /// Directory of the records of --synthetic
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/record"))]
    record: PathBuf,
}

/// Times prefill of `tokens` tokens and appends a row for each policy.
pub fn run(timing: &Timing, shape: &str, tokens: usize) -> Result<()> {
    ensure!(timing.repeats > 0, "--repeats: expected at least 1, got 0");
    ensure!(tokens > 0, "--tokens: expected at least 1, got 0");
    let gpu = Gpu::new()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let command = format!("cd examples/swap && cargo run --release -- {}", arguments.join(" "));
    let machine = gpu.machine()?.with_command(command);
    let (config, vb) = checkpoint(shape, timing.weights, timing.layers, tokens, &gpu.device)?;
    let mut stock = Stock::load(&config, vb.clone())?;
    let model = format!("{shape} {} layers {} weights", config.num_layers, timing.weights.name());
    println!("{}\n{}, {model}", machine.device(), stock.name());
    let ids =
        |tokens: usize| -> Result<Tensor> { Ok(Tensor::new(prompt(&config, tokens), &gpu.device)?.unsqueeze(0)?) };
    let mut run = |ids: &Tensor| -> Result<(Tensor, f64)> {
        stock.clear()?;
        let out = first_token(&gpu.device, || stock.prefill(ids));
        stock.clear()?;
        out
    };

    let policy = s2o::policy()?;
    s2o::set_policy(Policy::Dense);
    {
        let ids = ids(CHECKED.min(tokens))?;
        let decoder = Decoder::load(&config, &vb, None)?;
        let mut cache = decoder.new_cache(1, ids.dim(1)?)?;
        let ours = decoder.prefill(&ids, &mut cache, &Dense, PrefillOptions::new())?.last_logits()?;
        let (error, same) = apart(&run(&ids)?.0, &ours)?;
        println!("{} tokens: exact logits differ from our decoder's by {error:.2e}", ids.dim(1)?);
        ensure!(error.is_finite() && (same || error <= EXACT_WITHIN), "the models compute different things: not timed");
    }

    let ids = ids(tokens)?;
    let exact = run(&ids)?.0;
    s2o::set_policy(policy.clone());
    s2o::collect_stats(true);
    let sparse = run(&ids)?.0;
    let calls = s2o::take_stats()?;
    s2o::collect_stats(false);
    let density = AttnStats::joint_density(calls.iter().map(|call| &call.stats));
    let (error, same) = apart(&sparse, &exact)?;
    ensure!(error.is_finite(), "the logits are no numbers: not timed");

    let (mut dense_times, mut times) = (Vec::new(), Vec::new());
    for _ in 0..timing.repeats {
        s2o::set_policy(Policy::Dense);
        dense_times.push(run(&ids)?.1);
        s2o::set_policy(policy.clone());
        times.push(run(&ids)?.1);
    }
    let (dense_ms, ms) = (median(dense_times), median(times));
    println!("{tokens} tokens, exact       {dense_ms:10.1} ms to the first token");
    println!(
        "{tokens} tokens, the policy  {ms:10.1} ms, {:.2}x, density {density:.4}; \
         logits differ by {error:.2e}, {} token",
        dense_ms / ms,
        if same { "the same" } else { "another" },
    );
    let heads = [config.num_heads, config.num_kv_heads, config.head_dim];
    let row = |policy: &str| machine.row_of("prefill", &format!("{policy}, {model}"), [tokens; 2], heads, DTYPE);
    let (segment, tau) = match &policy {
        Policy::S2o(config) => (config.segment_len().resolve(tokens).to_string(), Some(config.tau().resolve(tokens))),
        Policy::Layers { base, .. } => (base.segment_len().resolve(tokens).to_string(), None),
        Policy::Dense => (String::new(), None),
    };
    let exact = Row { ms: dense_ms, density: Some(1.0), ..row("stock, drop-in dense") };
    let by_policy = Row {
        segment,
        tau,
        density: Some(density),
        ms,
        baseline: "stock, drop-in dense".into(),
        baseline_ms: Some(dense_ms),
        ratio: Some(dense_ms / ms),
        ..row("stock, drop-in s2o")
    };
    println!("{}", machine.append(&[exact, by_policy], &Place { record: timing.record.clone() })?.display());
    Ok(())
}
