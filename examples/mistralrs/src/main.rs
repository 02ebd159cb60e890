//! Runs stock mistral.rs on passkey prompts or on random tokens: with exact attention, then by the policy of
//! candle-s2o, and prints times, answers and the density. Calls of `flash_attn` reach the crate in the
//! `[patch.crates-io]` line of this workspace.

mod engine;
mod prompts;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Parser;
use engine::{Answer, Engine};

/// mistral.rs with its attention swapped by one line.
#[derive(Debug, Parser)]
struct Args {
    /// Directory of a model that mistral.rs loads: config.json, tokenizer.json and safetensors. Default: needle-11m.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Passkey prompts, a JSON object with `input`, `answer` and `tokens` in each line.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/passkey.jsonl"))]
    prompts: PathBuf,
    /// Use only prompts of at least this many tokens.
    #[arg(long, default_value_t = 30_000)]
    longer_than: usize,
    /// Time the first token of prompts of random tokens instead, of these lengths.
    #[arg(long, value_delimiter = ',')]
    time: Vec<usize>,
    /// Vocabulary of the random tokens.
    #[arg(long, default_value_t = 4096)]
    vocab: u32,
    /// Timed runs of each length, after one that is not timed.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Serve the model at this address, for example 127.0.0.1:1234, by the policy.
    #[arg(long, conflicts_with = "time")]
    serve: Option<String>,
    /// Tokens that the KV cache of `--serve` holds.
    #[arg(long, default_value_t = 131_072)]
    context: usize,
    /// Number of tokens to generate after a passkey prompt, greedily.
    #[arg(long, default_value_t = 24)]
    sample_len: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    #[cfg(feature = "nccl")]
    end_with_parent();
    let needle = tempfile::tempdir()?;
    if args.model.is_none() {
        s2o_needle_11m::write(needle.path())?;
    }
    let dir = args.model.as_deref().unwrap_or(needle.path());
    if let Some(address) = &args.serve {
        return Engine::load(dir, args.context).await?.serve(address).await;
    }
    if args.time.is_empty() { passkeys(&args, dir).await } else { time(&args, dir).await }
}

/// Ends this process when the one that started it has ended, if mistral.rs started it for another GPU. Otherwise it would
/// wait for requests forever.
#[cfg(feature = "nccl")]
fn end_with_parent() {
    if std::env::var_os("__MISTRALRS_DAEMON_INTERNAL").is_none() {
        return;
    }
    let parent = std::os::unix::process::parent_id();
    std::thread::spawn(move || {
        while std::os::unix::process::parent_id() == parent {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
        std::process::exit(1);
    });
}

async fn passkeys(args: &Args, dir: &std::path::Path) -> Result<()> {
    let records = prompts::passkeys(&args.prompts, args.longer_than)?;
    let longest = records.iter().map(|record| record.tokens).max().unwrap_or(0);
    let engine = Engine::load(dir, longest + args.sample_len).await?;
    let (mut right, mut equal) = (vec![0; engine::MODES.len()], 0);
    for record in &records {
        let mut texts = Vec::new();
        for (mode, right) in engine::MODES.iter().zip(&mut right) {
            mode.set();
            let Answer { text, seconds } = engine.complete(&record.input, args.sample_len).await?;
            println!("{:6} tokens  {:10} {seconds:7.3} s  {text:?}{}", record.tokens, mode.name(), mode.density()?);
            *right += usize::from(text.contains(&record.answer));
            texts.push(text);
        }
        equal += usize::from(texts.windows(2).all(|pair| pair[0] == pair[1]));
    }
    for (mode, right) in engine::MODES.iter().zip(right) {
        println!("{:10} {right} of {} answers contain the passkey", mode.name(), records.len());
    }
    if engine::MODES.len() > 1 {
        println!("{equal} of {} texts are equal", records.len());
    }
    Ok(())
}

async fn time(args: &Args, dir: &std::path::Path) -> Result<()> {
    ensure!(args.repeats > 0, "--repeats: expected at least 1, got 0");
    ensure!(args.vocab > 1, "--vocab: expected at least 2, got {}", args.vocab);
    let longest = args.time.iter().copied().max().unwrap_or(0);
    let engine = Engine::load(dir, longest + 1).await?;
    for &tokens in &args.time {
        let mut times = vec![Vec::new(); engine::MODES.len()];
        for run in 0..=args.repeats {
            for (mode, times) in engine::MODES.iter().zip(&mut times) {
                mode.set();
                let prompt = prompts::random(args.vocab, tokens, run as u64);
                let Answer { seconds, .. } = engine.first_token(prompt).await?;
                let density = mode.density()?;
                // The first run loads kernels and libraries.
                if run > 0 {
                    println!("{tokens:7} tokens  {:10} {seconds:7.3} s{density}", mode.name());
                    times.push(seconds);
                }
            }
        }
        for (mode, times) in engine::MODES.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            println!(
                "{tokens:7} tokens  {:10} median {:7.3} s of {}",
                mode.name(),
                times[times.len() / 2],
                times.len()
            );
        }
    }
    Ok(())
}
