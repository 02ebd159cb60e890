//! `evaluate tune`: a threshold for each layer.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use candle_s2o::{LayerSettings, TunedOn};
use clap::Args;
use s2o_eval::tune::{TAUS, TunedLayer, Tuner};
use s2o_models::{LoadedModel, PrefillOptions, passkey};

use crate::cli::layout::Look;
use crate::cli::model_flags::{self, ModelFlags};
use crate::cli::s2o_flags::{self, S2oFlags};
use crate::cli::{exit, machine, progress, prompt_flags};
use crate::record;

/// Tokens of the prompt that is built when none is given.
const DEFAULT_TOKENS: usize = 8192;
/// Where the built prompts hide their passkey.
const DEPTH: f64 = 0.5;

/// Prefills some prompts densely and, beside that, tries S2O with each threshold on what every layer is given. The
/// sparsest threshold within the bound is kept; a layer without one stays dense. The bound holds for each layer on its
/// own, on these prompts.
#[derive(Debug, Args)]
pub struct Flags {
    /// Largest relative L1 error of a layer's attention output, over all prompts
    #[arg(long, value_name = "X")]
    max_rel_l1: f64,
    /// A file that holds a prompt; may be given several times
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// Build a passkey prompt of each of these lengths too [default: 8192 where there is no --prompt-file]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Most tokens that are taken from a file, whose middle is cut out
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Seed of the passkey prompts
    #[arg(long, default_value_t = 299_792_458)]
    seed: u64,
    /// Thresholds to try
    #[arg(long, value_name = "TAUS", value_delimiter = ',', default_values_t = TAUS)]
    taus: Vec<f32>,
    /// Where the settings go, for --layers-file, `s2o:layers=FILE` and S2O_LAYERS
    #[arg(long, value_name = "FILE", default_value = "layers.json")]
    save: PathBuf,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
    /// Threads to use [default: all]
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

/// Tunes and saves.
pub fn run(flags: &Flags) -> Result<()> {
    machine::limit_threads(flags.threads);
    // Before the model: a wrong option should not cost the loading of 16 GB.
    if let Some(flag) = flags.s2o.tuned_flag() {
        bail!("{flag}: expected none of the flags that tuning decides, got it");
    }
    let base = flags.s2o.config()?;
    let tuner = Tuner::new(&base, &flags.taus)?;
    tuner.choose(flags.max_rel_l1).context("--max-rel-l1")?;

    let model = flags.model.load()?;
    let prompts = flags.prompts(&model)?;
    let device = model.decoder.device();
    let least = s2o_flags::dense_below(&base, device);
    for prompt in &prompts {
        ensure!(
            prompt.len() >= least,
            "prompts to tune on: expected at least {least} tokens, below which everything is dense (--dense-below), got {}",
            prompt.len()
        );
        prefill(&model, flags, prompt, &tuner)?;
    }

    let layers = tuner.choose(flags.max_rel_l1)?;
    let tuned_on = TunedOn {
        model: model.name.clone(),
        prompt_tokens: prompts.iter().map(Vec::len).collect(),
        max_rel_l1: flags.max_rel_l1,
        options: s2o_flags::describe_untuned(&base),
    };
    let settings = LayerSettings::new(tuned_on, layers.iter().map(TunedLayer::setting).collect())?;
    settings.check(model.config().num_layers)?;
    settings.save(&flags.save)?;
    if flags.json {
        return exit::print(&record::json_lines(&layers)?);
    }
    let look = Look::of_stdout();
    let gap = if look == Look::Terminal { "\n" } else { "" };
    let mean = layers.iter().map(|layer| layer.density).sum::<f64>() / layers.len() as f64;
    let lengths = prompts.iter().map(|prompt| prompt.len().to_string()).collect::<Vec<_>>().join(", ");
    exit::print(&format!(
        "{gap}model   {}\nprompts {lengths} tokens\nS2O     {}\n\n{}\n\nmean density {mean:.3}, relative L1 of each \
         layer at most {}; written to {}\n\n{}\n",
        model_flags::describe(&model),
        settings.tuned_on().options,
        record::table(&layers, look)?,
        flags.max_rel_l1,
        flags.save.display(),
        machine::describe(device),
    ))
}

impl Flags {
    fn prompts(&self, model: &LoadedModel) -> Result<Vec<Vec<u32>>> {
        let mut prompts = Vec::new();
        for path in &self.prompt_file {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            prompts.push(prompt_flags::encode(model, &text, &path.display().to_string(), self.context)?);
        }
        let lengths = match self.lengths.as_slice() {
            [] if prompts.is_empty() => &[DEFAULT_TOKENS],
            lengths => lengths,
        };
        for (seed, tokens) in (self.seed..).zip(lengths) {
            if model.is_synthetic {
                prompts.push(prompt_flags::random_tokens(model, *tokens, seed)?.tokens);
            } else {
                prompts.push(passkey::build(&model.tokenizer, *tokens, DEPTH, seed)?.tokens);
            }
        }
        Ok(prompts)
    }
}

fn prefill(model: &LoadedModel, flags: &Flags, prompt: &[u32], tuner: &Tuner) -> Result<()> {
    let tokens = model.prompt(prompt)?;
    let mut cache = model.decoder.new_cache(1, prompt.len())?;
    let bar = progress::bar("tuning", prompt.len(), "tokens");
    let mut report = |done: usize, _: usize| bar.set_position(done as u64);
    let options = PrefillOptions::new().chunk(flags.model.chunk).num_logits(0).on_progress(&mut report);
    model.decoder.prefill(&tokens, &mut cache, tuner, options)?;
    progress::finish(&bar);
    Ok(())
}
