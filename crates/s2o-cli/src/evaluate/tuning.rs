//! Flags and steps shared by the commands that make settings for a model from prompts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use s2o_eval::capture::LayerTensors;
use s2o_eval::tasks::passkey;
use s2o_models::LoadedModel;
use serde::Serialize;

use super::record;
use crate::layout::Look;
use crate::model_flags::{self, ModelFlags};
use crate::{exit, machine, prompt_flags, writable};

const DEFAULT_TOKENS: usize = 8192;
const DEPTH: f64 = 0.5;

/// Flags for the prompts and the model.
#[derive(Debug, Args)]
pub struct TuningFlags {
    /// A file that holds a prompt; may be given several times
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// Also build a passkey prompt of each of these lengths [default: 8192 without --prompt-file]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Maximum number of tokens from a file; the middle of a longer text is cut out [default: the whole text]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Seed of the passkey prompts
    #[arg(long, default_value_t = 299_792_458)]
    seed: u64,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub model: ModelFlags,
}

impl TuningFlags {
    /// Checks the flags first, before a model of up to 16 GB is loaded and tuned for an hour.
    pub fn begin(&self, save: &Path) -> Result<()> {
        let directory = save.parent().filter(|directory| *directory != Path::new(""));
        ensure!(
            directory.is_none_or(Path::is_dir) && !save.is_dir(),
            "--save: expected a file in a directory that exists, got {}",
            save.display()
        );
        writable::file(save)?;
        for path in &self.prompt_file {
            std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        }
        Ok(())
    }

    /// The prompts as tokens of the model.
    pub fn prompts(&self, model: &LoadedModel) -> Result<Vec<Vec<u32>>> {
        let mut prompts = Vec::new();
        for path in &self.prompt_file {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            prompts.push(prompt_flags::encode(model, &text, false, &path.display().to_string(), self.context)?);
        }
        let lengths = match self.lengths.as_slice() {
            [] if prompts.is_empty() => &[DEFAULT_TOKENS],
            lengths => lengths,
        };
        for (seed, tokens) in (self.seed..).zip(lengths) {
            if model.is_synthetic {
                prompts.push(prompt_flags::random_tokens(model, *tokens, seed)?.tokens);
            } else {
                prompts.push(passkey::build(&model.tokenizer, *tokens, DEPTH, seed).context("--lengths")?.tokens);
            }
        }
        Ok(prompts)
    }

    /// Prefills each prompt densely and returns the queries, keys and values of all layers.
    pub fn tensors(&self, model: &LoadedModel, prompts: &[Vec<u32>]) -> Result<Vec<LayerTensors>> {
        let layers: Vec<usize> = (0..model.config().num_layers).collect();
        let tensors = prompts.iter().map(|prompt| self.model.capture("prefill", model, prompt, &layers));
        Ok(tensors.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Prints a row for each layer below `options`, lines about what was not tuned, and `conclusion` below the table.
    pub fn print<R: Serialize>(
        &self,
        model: &LoadedModel,
        prompts: &[Vec<u32>],
        options: &str,
        rows: &[R],
        conclusion: &str,
    ) -> Result<()> {
        if self.json {
            return exit::print(&record::json_lines(rows)?);
        }
        let look = Look::of_stdout();
        let lengths = prompts.iter().map(|prompt| prompt.len().to_string()).collect::<Vec<_>>().join(", ");
        exit::print(&format!(
            "{}model   {}\nprompts {lengths} tokens\n{options}\n{}\n\n{conclusion}\n\n{}\n",
            look.gap(),
            model_flags::describe(model),
            record::table(rows, look)?,
            machine::describe(model.decoder.device()),
        ))
    }
}

pub fn mean<R>(rows: &[R], of: fn(&R) -> f64) -> f64 {
    rows.iter().map(of).sum::<f64>() / rows.len() as f64
}
