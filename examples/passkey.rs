//! Right answers on the passkey prompts of needle-7m, by attention method, length and chunk size.
//!
//! ```text
//! cargo run --release --example passkey -- --csv docs/results/passkey.csv
//! cargo run --release --features cuda --example passkey -- --tokens 4096,32768,65536,131072 --keys 0,16
//! ```

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use clap::Parser;
use rayon::prelude::*;
use s2o_models::passkey::{self, PasskeyRecord};
use s2o_models::{GenerationOptions, LoadOptions, LoadedModel, ModelSource, PrefillOptions};
use serde::Serialize;

#[allow(dead_code, reason = "only the thread limit is needed")]
#[path = "cli/machine.rs"]
mod machine;

/// Counts right answers on passkey prompts.
#[derive(Debug, Parser)]
struct Arguments {
    /// Prompts, one JSON object a line with `input`, `answer`, `kind`, `tokens`, `depth`; those of needle-7m if absent.
    #[arg(long)]
    prompts: Option<PathBuf>,
    /// Only prompts of at most this many tokens.
    #[arg(long, default_value_t = usize::MAX)]
    max_tokens: usize,
    /// Build prompts of these lengths in tokens instead.
    #[arg(long, value_delimiter = ',', conflicts_with = "prompts")]
    tokens: Vec<usize>,
    /// Built prompts of each length and kind.
    #[arg(long, default_value_t = 20)]
    per_length: usize,
    /// Kinds of built prompts: 0 for a passkey, else that many words with a number each, of which one is asked for.
    #[arg(long, value_delimiter = ',', default_value = "0,16")]
    keys: Vec<usize>,
    /// Run on the CPU in a build for GPUs.
    #[arg(long)]
    cpu: bool,
    /// Chunk sizes in tokens, 0 for whole prompts; answers are compared between them.
    #[arg(long, value_delimiter = ',', default_value = "0,4096")]
    chunk: Vec<usize>,
    /// Methods to run.
    #[arg(long, value_delimiter = ',', default_value = "dense,s2o,s2o-paper")]
    methods: Vec<String>,
    /// Where to write the table.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Worker threads; all cores if absent.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
}

/// One line of the table.
#[derive(Debug, Serialize)]
struct Row {
    method: String,
    device: String,
    /// Prompt length, rounded to the nearest thousand tokens.
    context: String,
    kind: String,
    chunk: usize,
    prompts: usize,
    right: usize,
    density: f64,
    /// Answers that differ from those of the first chunk size.
    changed_by_chunks: usize,
    command: String,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    machine::limit_threads(arguments.threads);
    let device = if cfg!(feature = "cuda") && !arguments.cpu { s2o_models::gpu(0)? } else { Device::Cpu };
    let device_name = if device.is_cpu() { "CPU" } else { "GPU" };
    let model = ModelSource::Needle7m.load(&LoadOptions { device, ..LoadOptions::default() }, None)?;
    let mut prompts = match &arguments.prompts {
        _ if !arguments.tokens.is_empty() => built(&model, &arguments)?,
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let records: Result<Vec<PasskeyRecord>> =
                text.lines().map(|line| serde_json::from_str(line).context("a prompt")).collect();
            recorded(&model, records?)?
        }
        None => recorded(&model, passkey::records()?)?,
    };
    prompts.retain(|prompt| prompt.tokens.len() <= arguments.max_tokens);
    let mut groups: Vec<(usize, &str)> = prompts.iter().map(Prompt::group).collect();
    groups.sort_unstable();
    groups.dedup();
    let methods = arguments
        .methods
        .iter()
        .map(|name| match name.as_str() {
            "dense" => Ok((name, None)),
            "s2o" => Ok((name, Some(S2oConfig::default()))),
            "s2o-paper" => Ok((name, Some(S2oConfig::paper()))),
            other => bail!("--methods: expected dense, s2o or s2o-paper, got {other}"),
        })
        .collect::<Result<Vec<_>>>()?;
    let features = if device_name == "GPU" { " --features cuda" } else { "" };
    let flags = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let command = format!("cargo run --release{features} --example passkey -- {flags}");
    println!(
        "{:10} {:>8} {:>8} {:>6} {:>7} {:>8} {:>8}",
        "method", "context", "kind", "chunk", "right", "density", "changed"
    );
    let mut rows = Vec::new();
    for (context, kind) in groups {
        let group: Vec<&Prompt> = prompts.iter().filter(|prompt| prompt.group() == (context, kind)).collect();
        for (name, config) in &methods {
            let mut first_answers: Option<Vec<String>> = None;
            for &chunk in &arguments.chunk {
                let run = run(&model, &group, config.as_ref(), chunk)?;
                let changed = match &first_answers {
                    None => 0,
                    Some(first) => first.iter().zip(&run.answers).filter(|(a, b)| a != b).count(),
                };
                first_answers.get_or_insert(run.answers);
                let row = Row {
                    method: (*name).clone(),
                    device: device_name.to_owned(),
                    context: format!("{context}K"),
                    kind: kind.to_owned(),
                    chunk,
                    prompts: group.len(),
                    right: run.right,
                    density: run.density,
                    changed_by_chunks: changed,
                    command: command.clone(),
                };
                println!(
                    "{:10} {:>8} {:>8} {:>6} {:>4}/{:<2} {:>8.3} {:>8}",
                    row.method, row.context, row.kind, chunk, row.right, row.prompts, row.density, changed
                );
                rows.push(row);
            }
        }
    }
    if let Some(path) = &arguments.csv {
        let mut writer = csv::Writer::from_path(path).with_context(|| path.display().to_string())?;
        for row in &rows {
            writer.serialize(row)?;
        }
        writer.flush()?;
    }
    Ok(())
}

/// A prompt and what must come out.
struct Prompt {
    tokens: Vec<u32>,
    answer: String,
    kind: String,
}

impl Prompt {
    /// Thousands of tokens, and the kind: what is a line of the table.
    fn group(&self) -> (usize, &str) {
        ((self.tokens.len() + 512) / 1024, &self.kind)
    }
}

/// Recorded prompts, all kinds together.
fn recorded(model: &LoadedModel, records: Vec<PasskeyRecord>) -> Result<Vec<Prompt>> {
    let prompt = |record: PasskeyRecord| {
        Ok(Prompt { tokens: model.encode(&record.input)?, answer: record.answer, kind: "all".to_owned() })
    };
    records.into_iter().map(prompt).collect()
}

/// Prompts of the lengths and kinds that are asked for; the depth of a passkey goes from 0 to 1.
fn built(model: &LoadedModel, arguments: &Arguments) -> Result<Vec<Prompt>> {
    let mut wanted = Vec::new();
    for &tokens in &arguments.tokens {
        for &keys in &arguments.keys {
            wanted.extend((0..arguments.per_length).map(|number| (tokens, keys, number)));
        }
    }
    let last = (arguments.per_length.max(2) - 1) as f64;
    wanted
        .into_par_iter()
        .map(|(tokens, keys, number)| {
            let seed = (tokens * 100 + number) as u64;
            let (prompt, kind) = match keys {
                0 => (passkey::build(&model.tokenizer, tokens, number as f64 / last, seed)?, "passkey".to_owned()),
                _ => (passkey::build_keyed(&model.tokenizer, tokens, keys, seed)?, format!("{keys}-key")),
            };
            Ok(Prompt { tokens: prompt.tokens, answer: prompt.answer, kind })
        })
        .collect()
}

/// One method over a group of prompts.
struct Run {
    answers: Vec<String>,
    right: usize,
    /// Mean over prompts and layers.
    density: f64,
}

fn run(model: &LoadedModel, prompts: &[&Prompt], config: Option<&S2oConfig>, chunk: usize) -> Result<Run> {
    let options = GenerationOptions { max_new_tokens: 12, ..GenerationOptions::default() };
    let mut run = Run { answers: Vec::new(), right: 0, density: 0.0 };
    for &Prompt { tokens, answer, .. } in prompts {
        let mut cache = model.decoder.new_cache(1, tokens.len() + options.max_new_tokens)?;
        let s2o = config.map(|config| S2o::new(config.clone()).with_stats());
        let method: &dyn Attention = match &s2o {
            Some(s2o) => s2o,
            None => &Dense,
        };
        let prefill = PrefillOptions::new().chunk((chunk > 0).then_some(chunk));
        let generated = model.generate(tokens, &mut cache, method, prefill, &options, &mut |_| {})?;
        run.density += match &s2o {
            Some(s2o) => {
                let stats = s2o.take_stats();
                AttnStats::joint_density(stats.values())
            }
            None => 1.0,
        };
        run.right += usize::from(passkey::answers_exactly(&generated.text, answer));
        run.answers.push(passkey::answer(&generated.text).to_owned());
    }
    run.density /= prompts.len() as f64;
    Ok(run)
}
