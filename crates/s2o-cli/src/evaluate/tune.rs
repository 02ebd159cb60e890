//! `evaluate tune`: a threshold for each layer.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use candle_s2o::{LayerSettings, TunedOn};
use clap::Args;
use s2o_eval::tune::{TAUS, TunedLayer, Tuner};

use super::tuning::{TuningFlags, mean};
use crate::s2o_flags::{self, S2oFlags};

/// Find a threshold for each layer that keeps its error within a bound
///
/// Prefills some prompts densely and tries S2O with each threshold on the inputs of every layer. The sparsest threshold
/// within the bound is kept; a layer without such a threshold stays dense. The bound holds for each layer separately,
/// on these prompts.
#[derive(Debug, Args)]
pub struct Flags {
    /// Largest relative L1 error of a layer's attention output, over all prompts
    #[arg(long, value_name = "X")]
    max_rel_l1: f64,
    /// Thresholds to try
    #[arg(long, value_name = "TAUS", value_delimiter = ',', default_values_t = TAUS)]
    taus: Vec<f32>,
    /// File for the settings, for --layers-file, `s2o:layers=FILE` and S2O_LAYERS
    #[arg(long, value_name = "FILE", default_value = "layers.json")]
    save: PathBuf,
    #[command(flatten)]
    tuning: TuningFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        self.tuning.begin(&self.save)?;
        if let Some(flag) = self.s2o.tuned_flag() {
            bail!("{flag}: expected none of the flags that tuning decides, got it");
        }
        let base = self.s2o.config()?;
        let tuner = Tuner::new(&base, &self.taus).context("--taus")?;
        tuner.choose(self.max_rel_l1).context("--max-rel-l1")?;

        let model = self.tuning.model.load()?;
        let prompts = self.tuning.prompts(&model)?;
        let least = s2o_flags::dense_below(&base, model.decoder.device());
        for prompt in &prompts {
            ensure!(
                prompt.len() >= least,
                "prompts to tune on: expected at least {least} tokens, below which everything is dense \
                 (--dense-below), got {}",
                prompt.len()
            );
            self.tuning.model.prefill("tuning", &model, prompt, &tuner)?;
        }

        let layers = tuner.choose(self.max_rel_l1)?;
        let tuned_on = TunedOn {
            model: model.name.clone(),
            prompt_tokens: prompts.iter().map(Vec::len).collect(),
            max_rel_l1: self.max_rel_l1,
            options: s2o_flags::describe_untuned(&base),
        };
        let settings = LayerSettings::new(tuned_on, layers.iter().map(TunedLayer::setting).collect())?;
        settings.check(model.config().num_layers)?;
        settings.save(&self.save)?;
        let options = format!("S2O     {}\n", settings.tuned_on().options);
        let conclusion = format!(
            "mean density {:.3}, relative L1 of each layer at most {}; written to {}",
            mean(&layers, |layer| layer.density),
            self.max_rel_l1,
            self.save.display(),
        );
        self.tuning.print(&model, &prompts, &options, &layers, &conclusion)
    }
}
