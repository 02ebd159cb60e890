//! `evaluate search-minference`: MInference's pattern for each head.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use s2o_baselines::{HeadPattern, MInference};
use s2o_eval::tune::search_minference;

use super::tuning::{Found, TuningFlags, mean};
use crate::progress;

/// Find MInference's pattern for each head
///
/// Prefills some prompts densely. Each head of every layer then gets the published pattern that captures most of the
/// attention of sampled queries, as a mean over the prompts. Holds the queries of all layers in memory.
#[derive(Debug, Args)]
pub struct Flags {
    /// Factor on the published sizes of the patterns; less is sparser
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    budget: f64,
    /// File for the patterns, for `minference:config=FILE`
    #[arg(long, value_name = "FILE", default_value = "minference.json")]
    save: PathBuf,
    #[command(flatten)]
    tuning: TuningFlags,
}

pub fn run(flags: &Flags) -> Result<()> {
    flags.tuning.begin(&flags.save)?;
    let budget = flags.budget;
    ensure!(budget > 0.0 && budget.is_finite(), "--budget: expected a number above 0, got {budget}");
    let candidates = HeadPattern::PUBLISHED.map(|pattern| pattern.scaled(budget));
    let trivial = candidates.iter().map(|pattern| pattern.dense_up_to()).max().unwrap_or(0);
    let method = MInference::default().candidates(candidates)?;

    let model = flags.tuning.model.load()?;
    let prompts = flags.tuning.prompts(&model)?;
    for prompt in &prompts {
        ensure!(
            prompt.len() > trivial,
            "prompts to search on: expected more than {trivial} tokens, up to which a pattern attends to everything \
             (--budget), got {}",
            prompt.len()
        );
    }
    let tensors = flags.tuning.tensors(&model, &prompts)?;
    let phase = progress::start("searching", model.config().num_layers, "layers");
    let mut report = |done: usize, _: usize| phase.set(done);
    let (config, rows) = search_minference(&tensors, &method, &mut report)?;
    phase.finish();
    config.save(&flags.save)?;

    let found = Found { model: &model, prompts: &prompts, options: None, rows: &rows };
    let density = mean(&rows, |layer| layer.density);
    flags.tuning.print(&found, &format!("mean density {density:.3}; written to {}", flags.save.display()))
}
