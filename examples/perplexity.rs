//! Perplexity of the last tokens of a long text, dense and S2O: what skipping costs a language model.
//!
//! ```text
//! cargo run --release --example perplexity -- --model target/models/SmolLM2-135M-Instruct.Q4_1.gguf --context 8192
//! ```

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use clap::Parser;
use s2o_models::{LoadOptions, LoadedModel, ModelSource, PrefillOptions, passkey};

#[allow(dead_code, reason = "only the thread limit is needed")]
#[path = "cli/machine.rs"]
mod machine;

/// Compares perplexities.
#[derive(Debug, Parser)]
struct Arguments {
    /// needle-7m, a hub id, a directory or a .gguf file.
    #[arg(long, default_value = "needle-7m")]
    model: String,
    /// Text to read; English documentation that comes with needle-7m if absent.
    #[arg(long)]
    text_file: Option<PathBuf>,
    /// Tokens of the text, from its beginning.
    #[arg(long, default_value_t = 8192)]
    context: usize,
    /// Tokens at the end whose perplexity counts.
    #[arg(long, default_value_t = 512)]
    last: usize,
    /// Worker threads; all cores if absent.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    machine::limit_threads(arguments.threads);
    let model = arguments.model.parse::<ModelSource>()?.load(&LoadOptions::default(), None)?;
    let text = match &arguments.text_file {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => passkey::haystack()?,
    };
    let mut tokens = model.encode(&text)?;
    ensure!(
        tokens.len() >= arguments.context,
        "text: expected at least {} tokens, got {}",
        arguments.context,
        tokens.len()
    );
    ensure!(
        (1..arguments.context).contains(&arguments.last),
        "--last: expected 1 to {}, got {}",
        arguments.context - 1,
        arguments.last
    );
    tokens.truncate(arguments.context);
    println!("{}, {} tokens, perplexity of the last {}", model.name, tokens.len(), arguments.last);
    println!("{:22} {:>10} {:>8} {:>12}", "method", "perplexity", "density", "top-1 agrees");
    // The dense tail covers the very tokens whose perplexity is taken: without it the sparse rows themselves show.
    let no_tail = S2oConfig::builder().dense_tail(0).build()?;
    let dense = run(&model, &tokens, arguments.last, &Dense)?;
    println!("{:22} {:>10.3} {:>8.3} {:>12.3}", "dense", dense.perplexity, 1.0, 1.0);
    for (name, config) in
        [("s2o", S2oConfig::default()), ("s2o, no dense tail", no_tail), ("s2o, paper's settings", S2oConfig::paper())]
    {
        let s2o = S2o::new(config).with_stats();
        let outcome = run(&model, &tokens, arguments.last, &s2o)?;
        let stats = s2o.take_stats();
        let density = AttnStats::joint_density(stats.values());
        let agree = outcome.top1.iter().zip(&dense.top1).filter(|(a, b)| a == b).count();
        println!(
            "{name:22} {:>10.3} {density:>8.3} {:>12.3}",
            outcome.perplexity,
            agree as f64 / dense.top1.len() as f64
        );
    }
    Ok(())
}

struct Outcome {
    perplexity: f64,
    top1: Vec<u32>,
}

fn run(model: &LoadedModel, tokens: &[u32], last: usize, method: &dyn Attention) -> Result<Outcome> {
    let inputs = &tokens[..tokens.len() - 1];
    let targets = &tokens[tokens.len() - last..];
    let mut cache = model.decoder.new_cache(1, inputs.len())?;
    let options = PrefillOptions::new().num_logits(last);
    let logits = model.decoder.prefill(&model.prompt(inputs)?, &mut cache, method, options)?.logits.squeeze(0)?;
    let log_probabilities = candle_nn::ops::log_softmax(&logits, 1)?;
    let targets = Tensor::new(targets, logits.device())?.unsqueeze(1)?;
    let loss = log_probabilities.gather(&targets, 1)?.mean_all()?.neg()?.to_scalar::<f32>()?;
    Ok(Outcome { perplexity: f64::from(loss).exp(), top1: logits.argmax(1)?.to_vec1()? })
}
