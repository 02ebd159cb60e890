//! `run`: every sample with every method; continues an interrupted run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::{fs, slice};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_s2o::{S2oConfig, S2oConfigBuilder};
use clap::Args;
use s2o_eval::method::MethodSpec;
use s2o_eval::run::{AtDensity, Event, Journal, Runner, Sample, Speed, knob_prefills, read_outcomes};
use s2o_eval::tasks::{ChatTemplate, is_ruler};
use s2o_eval::{EvalError, Provenance};
use s2o_models::{Chunk, LoadedModel};
use serde::Serialize;

use super::estimate::Estimate;
use super::record;
use super::samples::SampleFlags;
use super::tables;
use crate::layout::{grouped, shell_word};
use crate::model_flags::LoadFlags;
use crate::progress::{self, Progress};
use crate::writable::{self, cannot_write};
use crate::{exit, machine, model_flags, s2o_flags};

/// File of outcomes, in the directory of a run.
pub const OUTCOMES: &str = "outcomes.jsonl";
/// Name of the CSV file next to it that holds the provenance.
pub const RUNS: &str = "runs";
/// Name of the CSV file of settings at equal density.
const KNOBS: &str = "knobs";
/// Number of tasks whose first prompt decides a setting at equal density.
const KNOB_TASKS: usize = 3;

/// Score a model's answers with every method
///
/// Without arguments: the built-in model, a few tasks that it can answer, dense and S2O, about a minute on 2 cores. A
/// run continues where the last run in the same directory stopped. Answers are greedy.
#[derive(Debug, Args)]
pub struct Flags {
    /// Methods with their options, such as `dense,s2o,s2o:tau=0.05,sliding-window`; `list` shows them
    #[arg(long, value_name = "SPECS", value_delimiter = ',', default_values = ["dense", "s2o"])]
    methods: Vec<String>,
    /// Also run each method at these densities, by its knob, as `s2o@0.1`. The setting is found for each length on the
    /// first prompts of three tasks and stored in knobs.csv; the density of other prompts differs somewhat
    #[arg(long, value_name = "SHARES", value_delimiter = ',')]
    densities: Vec<f64>,
    /// Chat template: auto, none, llama3, chat-ml or qwen3; auto uses the token that ends the model's turns
    #[arg(long, value_name = "NAME", default_value = "auto")]
    template: String,
    /// Tokens per prefill chunk: numbers, `whole` or `auto`; with several, answers are compared with those of the first
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_values = ["auto"])]
    chunk: Vec<Chunk>,
    /// Directory for outcomes.jsonl, runs.csv, table.csv and table.md
    #[arg(long, value_name = "DIR", default_value = "evaluation")]
    out: PathBuf,
    /// Discard the outcomes in that directory
    #[arg(long)]
    fresh: bool,
    /// Print the number of prefills, the estimated time and the memory, and stop. Loads the model to measure its speed
    #[arg(long)]
    dry_run: bool,
    /// Also write RULER's prediction files, for RULER's own script
    #[arg(long)]
    predictions: bool,
    #[command(flatten)]
    samples: SampleFlags,
    #[command(flatten)]
    model: LoadFlags,
}

/// A started or continued run: a row of `runs.csv`.
#[derive(Debug, Serialize)]
struct RunRecord {
    /// Number of outcomes that the run has to compute.
    outcomes: usize,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        // Checked first, so that a wrong option does not cost the loading of 16 GB.
        if self.model.is_synthetic() {
            bail!("--synthetic: expected a model whose answers mean something, got made-up weights");
        }
        let specs = self.methods.iter().map(|text| text.parse()).collect::<s2o_eval::Result<Vec<MethodSpec>>>()?;
        let methods = specs.iter().map(|spec| Ok((spec.to_string(), spec.build()?)));
        let methods = methods.collect::<s2o_eval::Result<Vec<_>>>()?;
        let template = match self.template.as_str() {
            "auto" => None,
            name => Some(template(name)?),
        };
        self.samples.check()?;
        for density in &self.densities {
            ensure!(*density > 0.0 && *density < 1.0, "--densities: expected numbers between 0 and 1, got {density}");
        }

        writable::directory(&self.out)?;

        let model = self.model.load()?;
        let found = ChatTemplate::of_model(&model.tokenizer, &model.eos_ids);
        let bare = || Ok(Runner::new(&model, template.unwrap_or(found))?.chunks(self.chunk.iter().copied()));
        let runner = bare()?;
        let runner = methods.into_iter().fold(runner, |runner, (name, method)| runner.method(name, method));
        let mut samples = self.samples.samples(&model.tokenizer).map_err(with_lengths)?;
        runner.check_lengths(&samples).context("--lengths")?;
        if self.predictions && !samples.iter().any(|sample| is_ruler(sample.task())) {
            bail!("--predictions: expected a task of RULER, which the files are for, got none (--tasks ruler)");
        }
        if self.dry_run {
            return self.show_plan(&specs, &runner, &samples, |count| {
                self.announce(&specs, &model, template, found, &samples, count)
            });
        }
        // Only now, so that a run that cannot begin leaves no file.
        let mut journal = self.journal()?;
        self.announce(&specs, &model, template, found, &samples, journal.outcomes().len())?;
        let origin = record::here(&model_flags::describe(&model), model.decoder.device());
        let mut speed = None;
        if !self.densities.is_empty() {
            progress::say(&self.densities_follow(&specs, &samples)?);
        }
        self.go(&runner, &samples, &mut journal, &origin, &mut speed)?;
        if !self.densities.is_empty() {
            samples.sort_by_key(Sample::context_tokens);
            for samples in samples.chunk_by(|a, b| a.context_tokens() == b.context_tokens()) {
                let found = self.at_densities(&specs, &bare()?, samples, &origin)?;
                let built = found.iter().filter_map(|found| Some((found.name(), found.setting.as_ref()?)));
                let runner = built
                    .fold(bare(), |runner: Result<Runner>, (name, spec)| Ok(runner?.method(name, spec.build()?)))?;
                self.go(&runner, samples, &mut journal, &origin, &mut speed)?;
            }
        }

        tables::write(&self.out, journal.outcomes())?;
        if self.predictions {
            tables::write_predictions(&self.out, journal.outcomes(), &samples, &model)?;
        }
        tables::print(journal.outcomes())?;
        let files = format!("{OUTCOMES}, {RUNS}.csv, table.csv and table.md are in {}", self.out.display());
        let report = format!(
            "`s2o evaluate report {} --out report` makes a report",
            shell_word(&self.out.display().to_string())
        );
        exit::print(&format!("{files}\n{report}\n\n{}\n", machine::describe(model.decoder.device())))
    }

    fn journal(&self) -> Result<Journal> {
        fs::create_dir_all(&self.out).with_context(|| cannot_write(&self.out))?;
        let path = self.out.join(OUTCOMES);
        if !self.fresh {
            return Journal::open(path).map_err(with_way_out);
        }
        let journal = Journal::fresh(path)?;
        for name in [RUNS, KNOBS] {
            let path = self.out.join(name).with_extension("csv");
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| cannot_write(&path));
                }
                _ => {}
            }
        }
        Ok(journal)
    }

    /// The methods at equal densities for samples of one length: those in the file of an earlier run, and the rest.
    fn at_densities(
        &self,
        specs: &[MethodSpec],
        runner: &Runner,
        samples: &[Sample],
        origin: &Provenance,
    ) -> Result<Vec<AtDensity>> {
        let Some(first) = samples.first() else { return Ok(Vec::new()) };
        let path = self.out.join(KNOBS).with_extension("csv");
        let mut there: Vec<AtDensity> =
            match path.exists() {
                true => csv::Reader::from_path(&path)?.into_deserialize().collect::<csv::Result<_>>().with_context(
                    || format!("{}: expected settings at equal density; --fresh starts anew", path.display()),
                )?,
                false => Vec::new(),
            };
        let is_asked = |row: &AtDensity| {
            row.context_tokens == first.context_tokens()
                && specs.contains(&row.method)
                && self.densities.contains(&row.density)
        };
        there.retain(is_asked);
        let samples = knob_samples(samples);
        let mut all = Vec::new();
        for spec in specs {
            let is_there = |density: &f64| there.iter().any(|row| row.method == *spec && row.density == *density);
            let missing: Vec<f64> = self.densities.iter().copied().filter(|density| !is_there(density)).collect();
            let found = runner.at_densities(slice::from_ref(spec), &missing, &samples)?;
            record::append(&self.out, KNOBS, &found, origin)?;
            all.extend(found);
        }
        all.extend(there);
        Ok(all)
    }

    /// Prints the settings of the run. Most differences between published scores come from a wrong template.
    fn announce(
        &self,
        specs: &[MethodSpec],
        model: &LoadedModel,
        asked: Option<ChatTemplate>,
        found: ChatTemplate,
        samples: &[Sample],
        there: usize,
    ) -> Result<()> {
        let template = match asked {
            Some(template) => format!("{template}: {:?}", template.pattern()),
            None => format!("{found} (auto): {:?}", found.pattern()),
        };
        let there = match there {
            0 => String::new(),
            count => format!(", {count} outcomes exist"),
        };
        exit::print(&format!(
            "model     {}\ntemplate  {template}\nrun       {} samples, {}, chunk {}{there}\n{}\n",
            model_flags::describe(model),
            samples.len(),
            self.methods.join(", "),
            self.chunk.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            dense_lengths(specs, samples, model.decoder.device())?,
        ))
    }

    /// Computes the outcomes that the journal lacks, after a line on their cost.
    fn go(
        &self,
        runner: &Runner,
        samples: &[Sample],
        journal: &mut Journal,
        origin: &Provenance,
        speed: &mut Option<Speed>,
    ) -> Result<()> {
        let trials = runner.pending(samples, journal).map_err(with_way_out)?;
        let count = trials.len();
        if count == 0 {
            return Ok(());
        }
        // It costs prefills, so it is not made if nobody sees it.
        let estimate = (!progress::is_quiet()).then(|| Estimate::of(runner, &trials, *speed)).transpose()?;
        if let Some(estimate) = &estimate {
            *speed = Some(estimate.speed());
            progress::say(&estimate.text());
        }
        // Written before the first outcome, because an interrupted run has outcomes too.
        record::append(&self.out, RUNS, &[RunRecord { outcomes: count }], origin)?;
        let Some(estimate) = estimate else { return Ok(runner.run(&trials, journal, &mut |_| {})?) };
        progress::say("Ctrl-C stops the run; the same command goes on where it stopped");
        let phase = progress::start_estimated(format!("{count} outcomes"), estimate.milliseconds());
        let result = runner.run(&trials, journal, &mut |event| show(&phase, &estimate, event));
        phase.finish();
        Ok(result?)
    }

    /// The prefills that `--densities` adds. They are not in the estimate, because the settings are found after its
    /// prefills.
    fn densities_follow(&self, specs: &[MethodSpec], samples: &[Sample]) -> Result<String> {
        let sweeps = specs.iter().map(knob_prefills).collect::<s2o_eval::Result<Vec<_>>>()?;
        let methods = sweeps.iter().filter(|prefills| **prefills > 0).count();
        let mut by_length: BTreeMap<usize, Vec<&Sample>> = BTreeMap::new();
        for sample in samples {
            by_length.entry(sample.context_tokens()).or_default().push(sample);
        }
        let searched: usize = by_length.into_values().map(|samples| knob_samples(samples).len()).sum();
        Ok(format!(
            "densities at most {} prefills at equal density and {} to search their settings, in addition to the estimate",
            grouped((methods * self.densities.len() * samples.len() * self.chunk.len()) as f64),
            grouped((sweeps.iter().sum::<usize>() * searched) as f64),
        ))
    }

    /// `--dry-run`: says what a run would compute, and writes nothing.
    fn show_plan(
        &self,
        specs: &[MethodSpec],
        runner: &Runner,
        samples: &[Sample],
        announce: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let path = self.out.join(OUTCOMES);
        let outcomes = match path.exists() && !self.fresh {
            true => read_outcomes(&path).map_err(with_way_out)?,
            false => Vec::new(),
        };
        announce(outcomes.len())?;
        let trials = runner.missing(samples, &outcomes, &path).map_err(with_way_out)?;
        let mut text = match trials.is_empty() {
            true => "to do     nothing: all outcomes exist\n".to_owned(),
            false => Estimate::of(runner, &trials, None)?.text(),
        };
        if !self.densities.is_empty() {
            text.push_str(&format!("{}\n", self.densities_follow(specs, samples)?));
        }
        exit::print(&text)
    }
}

/// The first sample of each of the first [`KNOB_TASKS`] tasks.
fn knob_samples<'s>(samples: impl IntoIterator<Item = &'s Sample>) -> Vec<&'s Sample> {
    let mut first: Vec<&Sample> = Vec::new();
    for sample in samples {
        if first.len() < KNOB_TASKS && first.iter().all(|other| other.task() != sample.task()) {
            first.push(sample);
        }
    }
    first
}

/// Lines on the lengths at which S2O takes the dense path, whose scores are those of exact attention.
fn dense_lengths(specs: &[MethodSpec], samples: &[Sample], device: &Device) -> Result<String> {
    let mut names: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for spec in specs.iter().filter(|spec| ["s2o", "s2o-paper"].contains(&spec.name())) {
        let given = spec.option("dense-below").unwrap_or("auto");
        let config = S2oConfig::builder().set("dense-below", given).and_then(S2oConfigBuilder::build)?;
        names.entry(s2o_flags::dense_below(&config, device)).or_default().push(spec.to_string());
    }
    let lengths: BTreeSet<usize> = samples.iter().map(Sample::context_tokens).collect();
    let mut lines = String::new();
    for (below, names) in names {
        // A prompt is at most as long as was asked for.
        let lengths: Vec<String> = lengths.range(..=below).map(usize::to_string).collect();
        if !lengths.is_empty() {
            let (names, lengths) = (names.join(", "), lengths.join(", "));
            lines += &format!("dense     {names} in prompts of fewer than {below} tokens (dense-below): {lengths}\n");
        }
    }
    Ok(lines)
}

fn show(phase: &Progress, estimate: &Estimate, event: Event) {
    match event {
        Event::Started(trial) => {
            let (task, tokens) = (trial.sample.task(), trial.sample.context_tokens());
            phase.name_step(format!("{task} {tokens}, {}", trial.key.method));
        }
        Event::Finished(outcome) => {
            phase.add(estimate.milliseconds_of(&outcome.task, outcome.context_tokens) as usize);
        }
    }
}

fn template(name: &str) -> Result<ChatTemplate> {
    name.parse().map_err(|_| anyhow::anyhow!("--template: expected auto, {}, got {name}", ChatTemplate::names()))
}

/// Names the flag of a length that is too short for the items of a file.
fn with_lengths(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(EvalError::ContextTooShort { .. }) => error.context("--lengths"),
        _ => error,
    }
}

/// Adds the flags that avoid the outcomes of another run.
fn with_way_out(error: EvalError) -> anyhow::Error {
    match error {
        EvalError::OtherRun { .. } | EvalError::MalformedLine { .. } => {
            anyhow::anyhow!("{error}; --fresh starts anew, --out takes another directory")
        }
        error => error.into(),
    }
}
