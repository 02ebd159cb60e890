//! Right answers on the passkey prompts of needle-7m, by attention method, length and chunk size.
//!
//! ```text
//! cargo run --release --example passkey -- --csv docs/results/passkey.csv
//! ```

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use clap::Parser;
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
    /// Prompt length, rounded to the nearest thousand tokens.
    context: String,
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
    let mut records = match &arguments.prompts {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| path.display().to_string())?
            .lines()
            .map(|line| serde_json::from_str(line).context("a prompt"))
            .collect::<Result<Vec<PasskeyRecord>>>()?,
        None => passkey::records()?,
    };
    records.retain(|record| record.tokens <= arguments.max_tokens);
    let model = ModelSource::Needle7m.load(&LoadOptions::default(), None)?;
    let mut contexts: Vec<usize> = records.iter().map(context_of).collect();
    contexts.sort_unstable();
    contexts.dedup();
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
    let command =
        format!("cargo run --release --example passkey -- {}", std::env::args().skip(1).collect::<Vec<_>>().join(" "));
    println!("{:10} {:>8} {:>6} {:>7} {:>8} {:>8}", "method", "context", "chunk", "right", "density", "changed");
    let mut rows = Vec::new();
    for context in contexts {
        let group: Vec<&PasskeyRecord> = records.iter().filter(|record| context_of(record) == context).collect();
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
                    context: format!("{context}K"),
                    chunk,
                    prompts: group.len(),
                    right: run.right,
                    density: run.density,
                    changed_by_chunks: changed,
                    command: command.clone(),
                };
                println!(
                    "{:10} {:>8} {:>6} {:>4}/{:<2} {:>8.3} {:>8}",
                    row.method, row.context, chunk, row.right, row.prompts, row.density, changed
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

fn context_of(record: &PasskeyRecord) -> usize {
    (record.tokens + 512) / 1024
}

/// One method over a group of prompts.
struct Run {
    answers: Vec<String>,
    right: usize,
    /// Mean over prompts and layers.
    density: f64,
}

fn run(model: &LoadedModel, records: &[&PasskeyRecord], config: Option<&S2oConfig>, chunk: usize) -> Result<Run> {
    let options = GenerationOptions { max_new_tokens: 12, ..GenerationOptions::default() };
    let mut run = Run { answers: Vec::new(), right: 0, density: 0.0 };
    for record in records {
        let tokens = model.encode(&record.input)?;
        let mut cache = model.decoder.new_cache(1, tokens.len() + options.max_new_tokens)?;
        let s2o = config.map(|config| S2o::new(config.clone()).with_stats());
        let method: &dyn Attention = match &s2o {
            Some(s2o) => s2o,
            None => &Dense,
        };
        let prefill = PrefillOptions::new().chunk((chunk > 0).then_some(chunk));
        let generated = model.generate(&tokens, &mut cache, method, prefill, &options, &mut |_| {})?;
        run.density += match &s2o {
            Some(s2o) => {
                let stats = s2o.take_stats();
                AttnStats::joint_density(stats.values())
            }
            None => 1.0,
        };
        run.right += usize::from(passkey::answers_exactly(&generated.text, &record.answer));
        run.answers.push(passkey::answer(&generated.text).to_owned());
    }
    run.density /= records.len() as f64;
    Ok(run)
}
