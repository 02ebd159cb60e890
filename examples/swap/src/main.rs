//! Prefills a prompt with Candle's own, unchanged `llama` or `qwen3`: exactly, then with S2O, and prints the density;
//! or times both. Calls of `flash_attn` reach the crate in the `[patch.crates-io]` line of this workspace.

#[path = "../../../benches/prefill/checkpoint.rs"]
mod checkpoint;
#[path = "../../../benches/prefill/logits.rs"]
mod logits;
#[allow(dead_code, reason = "shared with the benchmarks")]
#[path = "../../../benches/measure/mod.rs"]
mod measure;
mod model;
#[path = "../../../benches/prefill/stock.rs"]
mod stock;
mod timing;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_flash_attn::s2o::{self, AttnStats, Policy};
use clap::Parser;
use model::Model;
use s2o_eval::tasks::passkey;
use tokenizers::Tokenizer;

/// Stock candle-transformers with its attention swapped by one line.
#[derive(Debug, Parser)]
struct Args {
    /// Directory of a Llama or Qwen3 model: config.json, tokenizer.json and safetensors. Default: needle-11m.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Text to prefill. Default: a passkey question of 16384 tokens, or of --tokens tokens.
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Cut the prompt, or repeat it, to this many tokens.
    #[arg(long)]
    tokens: Option<usize>,
    /// Number of tokens to generate after the prompt, greedily.
    #[arg(long, default_value_t = 16)]
    sample_len: usize,
    /// Compute on the CPU. The build still needs CUDA, because candle-transformers' feature flash-attn enables it.
    #[arg(long)]
    cpu: bool,
    #[command(flatten)]
    timing: timing::Timing,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(shape) = &args.timing.synthetic {
        return timing::run(&args.timing, shape, args.tokens.unwrap_or(128 << 10));
    }
    let needle = tempfile::tempdir()?;
    if args.model.is_none() {
        s2o_needle_11m::write(needle.path())?;
    }
    let dir = args.model.as_deref().unwrap_or(needle.path());
    let device = if args.cpu { Device::Cpu } else { Device::new_cuda(0).context("no GPU; use --cpu")? };
    let dtype = if args.cpu { DType::F32 } else { DType::BF16 };
    let mut model = Model::load(dir, dtype, &device)?;
    let path = dir.join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    let mut ids = match &args.prompt_file {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            tokenizer.encode(text, true).map_err(anyhow::Error::msg)?.get_ids().to_vec()
        }
        None => passkey::build(&tokenizer, args.tokens.unwrap_or(16 << 10), 0.5, 0)?.tokens,
    };
    ensure!(!ids.is_empty(), "the prompt: expected at least one token, got none");
    if let Some(tokens) = args.tokens {
        ids = ids.iter().copied().cycle().take(tokens).collect();
    }
    let longest = model.max_positions();
    ensure!(
        !ids.is_empty() && ids.len() + args.sample_len <= longest,
        "the prompt and {} tokens more: expected 1 to {longest} tokens as max_position_embeddings, got {}",
        args.sample_len,
        ids.len() + args.sample_len
    );
    let policy = s2o::policy()?;
    println!("model   {}, {dtype:?}, {}", model.name(), if args.cpu { "CPU" } else { "GPU 0" });
    println!("prompt  {} tokens\npolicy  {policy:?}\n", ids.len());

    // The first run loads the kernels of a GPU, so it is not timed.
    prefill(&mut model, &ids, &device)?;
    s2o::set_policy(Policy::Dense);
    let (dense, dense_time) = prefill(&mut model, &ids, &device)?;
    let dense_text = written(&mut model, &tokenizer, &dense, ids.len(), args.sample_len, &device)?;
    s2o::set_policy(policy.clone());
    s2o::collect_stats(true);
    let (sparse, sparse_time) = prefill(&mut model, &ids, &device)?;
    let calls = s2o::take_stats()?;
    s2o::collect_stats(false);
    let sparse_text = written(&mut model, &tokenizer, &sparse, ids.len(), args.sample_len, &device)?;

    for (layer, call) in calls.iter().enumerate() {
        print!("layer {layer:3}  density {:.3}", call.stats.density());
        if let Some(probes) = call.stats.probes() {
            let (low, high) = probes.interval();
            print!("  error {:.3} ({low:.3} to {high:.3}), measured on its probes", probes.relative_error());
        }
        println!();
    }
    if calls.is_empty() {
        println!("no call reached the policy: it is Dense, or the model calls flash_attn on GPUs only (stock qwen3)");
    } else {
        let density = AttnStats::joint_density(calls.iter().map(|call| &call.stats));
        println!("all calls  density {density:.3}");
    }
    let apart = (&dense - &sparse)?.abs()?.max(D::Minus1)?.to_scalar::<f32>()?;
    let ratio = dense_time.as_secs_f64() / sparse_time.as_secs_f64();
    println!("\nprefill    dense {dense_time:.3?}, by the policy {sparse_time:.3?} ({ratio:.2}x)");
    println!("logits     largest difference {apart:.3e}");
    println!("dense writes   {dense_text:?}\npolicy writes  {sparse_text:?}");
    Ok(())
}

/// Logits after the prompt, and the time of the prefill.
fn prefill(model: &mut Model, ids: &[u32], device: &Device) -> Result<(Tensor, Duration)> {
    let input = Tensor::new(ids, device)?.unsqueeze(0)?;
    model.clear()?;
    let start = Instant::now();
    let logits = model.forward(&input, 0)?;
    device.synchronize()?;
    Ok((logits, start.elapsed()))
}

fn written(
    model: &mut Model,
    tokenizer: &Tokenizer,
    logits: &Tensor,
    prompt_len: usize,
    sample_len: usize,
    device: &Device,
) -> Result<String> {
    let mut ids = Vec::with_capacity(sample_len);
    let mut logits = logits.clone();
    for position in prompt_len..prompt_len + sample_len {
        let id = logits.argmax(D::Minus1)?.to_scalar::<u32>()?;
        ids.push(id);
        logits = model.forward(&Tensor::new(&[[id]], device)?, position)?;
    }
    tokenizer.decode(&ids, true).map_err(anyhow::Error::msg)
}
