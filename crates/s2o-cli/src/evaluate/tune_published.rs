//! `evaluate tune-spargeattn` and `search-minference`: settings of published methods for each layer and head.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use s2o_baselines::{HeadPattern, MInference, SpargeBounds};
use s2o_eval::tune::{search_minference, tune_spargeattn};

use super::tuning::{TuningFlags, mean};
use crate::progress;

/// Find SpargeAttn's settings for each layer and head that keep a head's error within bounds
///
/// Prefills some prompts densely and tries SpargeAttn with each setting of a grid on the queries, keys and values of
/// every layer. Each head gets the tau and theta of least density whose error is within --l1 on every prompt. Each
/// layer then gets the lambda that leaves out most values with every head within --l2 (none on a GPU). This takes about
/// 60 times the attention of a prefill and holds the queries of all layers in memory.
#[derive(Debug, Args)]
pub struct SpargeFlags {
    /// Largest relative L1 error of a head's output from the choice of blocks
    #[arg(long, value_name = "X", default_value_t = SpargeBounds::default().l1())]
    l1: f64,
    /// Largest relative L1 error of a head's output when values are left out too, at least --l1
    #[arg(
        long,
        visible_alias = "pv-l1",
        value_name = "X",
        default_value_t = SpargeBounds::default().l2()
    )]
    l2: f64,
    /// File for the settings, for `spargeattn:config=FILE`
    #[arg(long, value_name = "FILE", default_value = "spargeattn.json")]
    save: PathBuf,
    #[command(flatten)]
    tuning: TuningFlags,
}

impl SpargeFlags {
    pub fn run(&self) -> Result<()> {
        self.tuning.begin(&self.save)?;
        let bounds = SpargeBounds::new(self.l1, self.l2)?;

        let model = self.tuning.model.load()?;
        let prompts = self.tuning.prompts(&model)?;
        let tensors = self.tuning.tensors(&model, &prompts)?;
        let tune = |report: &mut dyn FnMut(usize, usize)| tune_spargeattn(&tensors, bounds, report);
        let (config, rows) = progress::during("tuning", model.config().num_layers, "layers", tune)?;
        config.save(&self.save)?;

        let conclusion = format!(
            "mean density {:.3}, relative L1 of each head at most {} by blocks and {} with values left out; \
             written to {}",
            mean(&rows, |layer| layer.density),
            self.l1,
            self.l2,
            self.save.display(),
        );
        self.tuning.print(&model, &prompts, "", &rows, &conclusion)
    }
}

/// Find MInference's pattern for each head
///
/// Prefills some prompts densely. Each head of every layer then gets the published pattern that captures most of the
/// attention of sampled queries, as a mean over the prompts. Holds the queries of all layers in memory.
#[derive(Debug, Args)]
pub struct MInferenceFlags {
    /// Factor on the published sizes of the patterns; less is sparser
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    budget: f64,
    /// File for the patterns, for `minference:config=FILE`
    #[arg(long, value_name = "FILE", default_value = "minference.json")]
    save: PathBuf,
    #[command(flatten)]
    tuning: TuningFlags,
}

impl MInferenceFlags {
    pub fn run(&self) -> Result<()> {
        self.tuning.begin(&self.save)?;
        let budget = self.budget;
        ensure!(budget > 0.0 && budget.is_finite(), "--budget: expected a number above 0, got {budget}");
        let candidates = HeadPattern::PUBLISHED.map(|pattern| pattern.scaled(budget));
        let trivial = candidates.iter().map(|pattern| pattern.dense_up_to()).max().unwrap_or(0);
        let method = MInference::default().candidates(candidates)?;

        let model = self.tuning.model.load()?;
        let prompts = self.tuning.prompts(&model)?;
        for prompt in &prompts {
            ensure!(
                prompt.len() > trivial,
                "prompts to search on: expected more than {trivial} tokens, up to which a pattern attends to \
                 everything (--budget), got {}",
                prompt.len()
            );
        }
        let tensors = self.tuning.tensors(&model, &prompts)?;
        let search = |report: &mut dyn FnMut(usize, usize)| search_minference(&tensors, &method, report);
        let (config, rows) = progress::during("searching", model.config().num_layers, "layers", search)?;
        config.save(&self.save)?;

        let density = mean(&rows, |layer| layer.density);
        let conclusion = format!("mean density {density:.3}; written to {}", self.save.display());
        self.tuning.print(&model, &prompts, "", &rows, &conclusion)
    }
}
