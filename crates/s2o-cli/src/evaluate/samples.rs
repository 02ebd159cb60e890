//! Flags that select samples, and the samples.

use std::collections::HashMap;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use s2o_eval::EvalError;
use s2o_eval::load::{self, DEFAULT_MAX_TOKENS, NEEDLE_7M};
use s2o_eval::run::{Grid, Passage, Sample, task_names};
use s2o_eval::tasks::Item;
use tokenizers::Tokenizer;

/// The name of the task that measures the perplexity of a text.
pub const PERPLEXITY: &str = "perplexity";

/// Tasks that the built-in model can answer.
const DEFAULT_TASKS: &[&str] = &["passkey", "keyed_4", "niah_single_2"];
const DEFAULT_LENGTHS: &[usize] = &[2048, 4096];
const DEFAULT_ITEMS: u64 = 4;
const RECORDED_LENGTHS: &[usize] = &[4096, 32768];
const PERPLEXITY_TOKENS: usize = 8192;

/// Flags that select the samples.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tasks")]
pub struct SampleFlags {
    /// Tasks by name, or `ruler`, `keyed`, `all`; `list` shows them [default: passkey, keyed_4 and niah_single_2,
    /// unless files are given]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    tasks: Vec<String>,
    /// Prompt lengths in tokens [default: 2048,4096; for needle-7m the recorded lengths; for perplexity 8192; for
    /// LongBench v2 and InfiniteBench 120000, with texts cut in their middle]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Depths of the requested fact, 0 at the start and 1 at the end [default: chosen by the seed]
    #[arg(long, value_name = "SHARES", value_delimiter = ',')]
    depths: Vec<f64>,
    /// Items of each task, length and depth [default: 4; all items of a file]
    #[arg(long, value_name = "N")]
    items: Option<NonZeroU64>,
    /// Seed of words, numbers and places
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Data of RULER's own scripts: a directory with TASK/validation.jsonl
    #[arg(long, value_name = "DIR")]
    ruler_dir: Option<PathBuf>,
    /// LongBench v2's data.json
    #[arg(long, value_name = "FILE")]
    longbench_file: Option<PathBuf>,
    /// InfiniteBench: a directory with TASK.jsonl
    #[arg(long, value_name = "DIR")]
    infinitebench_dir: Option<PathBuf>,
    /// A text to measure perplexity on; `--tasks perplexity` uses a text that comes with needle-7m
    #[arg(long, value_name = "FILE")]
    text_file: Option<PathBuf>,
    /// Tokens at the end of a text whose perplexity is measured
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    last: usize,
}

/// Adds the task that has no questions to the names of a list.
fn with_perplexity(error: EvalError) -> EvalError {
    match error {
        EvalError::Unknown { what, expected, got } => {
            EvalError::Unknown { what, expected: format!("{expected}, {PERPLEXITY}"), got }
        }
        other => other,
    }
}

impl SampleFlags {
    /// Checks the flags as far as possible without a model.
    pub fn check(&self) -> Result<()> {
        task_names(self.questions()).map_err(with_perplexity)?;
        if self.lengths.contains(&0) {
            bail!("--lengths: expected at least 1 token, got 0");
        }
        for depth in &self.depths {
            ensure!((0.0..=1.0).contains(depth), "--depths: expected numbers from 0 to 1, got {depth}");
        }
        for path in [&self.ruler_dir, &self.longbench_file, &self.infinitebench_dir, &self.text_file] {
            let Some(path) = path else { continue };
            fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        }
        Ok(())
    }

    /// The samples, in the order of the flags.
    pub fn samples(&self, tokenizer: &Tokenizer) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for name in task_names(self.questions())? {
            let (lengths, items) = match name {
                NEEDLE_7M => (RECORDED_LENGTHS, u64::MAX),
                _ => (DEFAULT_LENGTHS, DEFAULT_ITEMS),
            };
            let grid = Grid {
                lengths: self.lengths_or(lengths),
                depths: self.depths.clone(),
                items: self.items.map_or(items, NonZeroU64::get),
                seed: self.seed,
            };
            samples.extend(grid.samples([name])?);
        }
        if let Some(dir) = &self.ruler_dir {
            samples.extend(self.first_of_each_task(load::ruler_directory(dir)?));
        }
        for max_tokens in self.lengths_or(&[DEFAULT_MAX_TOKENS]) {
            if let Some(path) = &self.longbench_file {
                samples.extend(self.first_of_each_task(load::longbench_v2(path, tokenizer, max_tokens)?));
            }
            if let Some(dir) = &self.infinitebench_dir {
                samples.extend(self.first_of_each_task(load::infinitebench_directory(dir, tokenizer, max_tokens)?));
            }
        }
        for context_tokens in self.lengths_or(&[PERPLEXITY_TOKENS]) {
            if self.tasks.iter().any(|name| name == PERPLEXITY) {
                samples.push(Sample::Passage(Passage::embedded(context_tokens, self.last)?));
            }
            if let Some(path) = &self.text_file {
                samples.push(Sample::Passage(self.passage(path, context_tokens)?));
            }
        }
        if samples.is_empty() {
            bail!("nothing to run: expected a length among 4096 and 32768 for {NEEDLE_7M}, got {:?}", self.lengths);
        }
        Ok(samples)
    }

    /// Names of the tasks with questions that are not read from files.
    fn questions(&self) -> impl Iterator<Item = &str> {
        let has_files = self.ruler_dir.is_some()
            || self.longbench_file.is_some()
            || self.infinitebench_dir.is_some()
            || self.text_file.is_some();
        let defaults = if self.tasks.is_empty() && !has_files { DEFAULT_TASKS } else { &[] };
        defaults.iter().copied().chain(self.tasks.iter().map(String::as_str)).filter(|name| *name != PERPLEXITY)
    }

    fn lengths_or(&self, defaults: &[usize]) -> Vec<usize> {
        if self.lengths.is_empty() { defaults.to_vec() } else { self.lengths.clone() }
    }

    fn first_of_each_task(&self, items: Vec<Item>) -> impl Iterator<Item = Sample> {
        let most = self.items.map_or(u64::MAX, NonZeroU64::get);
        let mut taken: HashMap<String, u64> = HashMap::new();
        let is_wanted = move |item: &Item| {
            let count = taken.entry(item.task.clone()).or_default();
            *count += 1;
            *count <= most
        };
        items.into_iter().filter(is_wanted).map(Sample::Given)
    }

    fn passage(&self, path: &Path, context_tokens: usize) -> Result<Passage> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Passage { name, text: text.into(), context_tokens, last: self.last })
    }
}
