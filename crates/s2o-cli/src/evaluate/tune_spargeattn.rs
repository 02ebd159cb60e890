//! `evaluate tune-spargeattn`: SpargeAttn's settings for each layer and head.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use s2o_baselines::SpargeBounds;
use s2o_eval::tune::tune_spargeattn;

use super::tuning::{Found, TuningFlags, mean};
use crate::progress;

/// Find SpargeAttn's settings for each layer and head that keep a head's error within bounds
///
/// Prefills some prompts densely and tries SpargeAttn with each setting of a grid on the queries, keys and values of
/// every layer. Each head gets the tau and theta of least density whose error is within --l1 on every prompt. Each
/// layer then gets the lambda that leaves out most values with every head within --l2 (none on a GPU). This takes about
/// 60 times the attention of a prefill and holds the queries of all layers in memory.
#[derive(Debug, Args)]
pub struct Flags {
    /// Largest relative L1 error of a head's output from the choice of blocks
    #[arg(long, value_name = "X", default_value_t = SpargeBounds::default().l1())]
    l1: f64,
    /// Largest relative L1 error of a head's output when values are left out too, at least --l1
    #[arg(long, visible_alias = "pv-l1", value_name = "X", default_value_t = SpargeBounds::default().l2())]
    l2: f64,
    /// File for the settings, for `spargeattn:config=FILE`
    #[arg(long, value_name = "FILE", default_value = "spargeattn.json")]
    save: PathBuf,
    #[command(flatten)]
    tuning: TuningFlags,
}

pub fn run(flags: &Flags) -> Result<()> {
    flags.tuning.begin(&flags.save)?;
    let bounds = SpargeBounds::new(flags.l1, flags.l2)?;

    let model = flags.tuning.model.load()?;
    let prompts = flags.tuning.prompts(&model)?;
    let tensors = flags.tuning.tensors(&model, &prompts)?;
    let phase = progress::start("tuning", model.config().num_layers, "layers");
    let mut report = |done: usize, _: usize| phase.set(done);
    let (config, rows) = tune_spargeattn(&tensors, bounds, &mut report)?;
    phase.finish();
    config.save(&flags.save)?;

    let found = Found { model: &model, prompts: &prompts, options: None, rows: &rows };
    let conclusion = format!(
        "mean density {:.3}, relative L1 of each head at most {} by blocks and {} with values left out; written to {}",
        mean(&rows, |layer| layer.density),
        flags.l1,
        flags.l2,
        flags.save.display(),
    );
    flags.tuning.print(&found, &conclusion)
}
