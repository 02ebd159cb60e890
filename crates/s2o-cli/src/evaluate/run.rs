//! `run`: every sample with every method; continues an interrupted run.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use s2o_eval::method::MethodSpec;
use s2o_eval::run::{Event, Journal, Runner, Sample, read_outcomes};
use s2o_eval::tasks::ChatTemplate;
use s2o_eval::{EvalError, Provenance};
use s2o_models::{Chunk, LoadedModel};
use serde::Serialize;

use super::record;
use super::samples::SampleFlags;
use super::tables;
use crate::model_flags::LoadFlags;
use crate::progress::{self, Progress};
use crate::{exit, machine, model_flags};

/// File of outcomes, in the directory of a run.
const OUTCOMES: &str = "outcomes.jsonl";
/// Name of the CSV file next to it that holds the provenance.
const RUNS: &str = "runs";

/// Score a model's answers with every method
///
/// Without arguments: the built-in model, a few tasks that it can answer, dense and S2O, about a minute on 2 cores. A
/// run continues where the last run in the same directory stopped. Answers are greedy.
#[derive(Debug, Args)]
pub struct Flags {
    /// Methods with their options, such as `dense,s2o,s2o:tau=0.05,sliding-window`; `list` shows them
    #[arg(long, value_name = "SPECS", value_delimiter = ',', default_values = ["dense", "s2o"])]
    methods: Vec<String>,
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
    /// Also write RULER's prediction files, for RULER's own script
    #[arg(long)]
    predictions: bool,
    #[command(flatten)]
    samples: SampleFlags,
    #[command(flatten)]
    model: LoadFlags,
}

/// Make the tables of a run again, even while it is running
#[derive(Debug, Args)]
pub struct ReportFlags {
    /// Directory that `run` got as --out
    #[arg(default_value = "evaluation")]
    directory: PathBuf,
}

impl ReportFlags {
    pub fn run(&self) -> Result<()> {
        let outcomes = read_outcomes(self.directory.join(OUTCOMES))?;
        tables::write(&self.directory, &outcomes)?;
        tables::print(&outcomes)
    }
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

        let model = self.model.load()?;
        let found = ChatTemplate::of_model(&model.tokenizer, &model.eos_ids);
        let runner = Runner::new(&model, template.unwrap_or(found))?.chunks(self.chunk.iter().copied());
        let runner = methods.into_iter().fold(runner, |runner, (name, method)| runner.method(name, method));
        let samples = self.samples.samples(&model.tokenizer)?;
        let mut journal = self.journal()?;
        self.announce(&model, template, found, &samples, &journal)?;
        let origin = record::here(&model_flags::describe(&model), model.decoder.device());
        self.go(&runner, &samples, &mut journal, &origin)?;

        tables::write(&self.out, journal.outcomes())?;
        if self.predictions {
            tables::write_predictions(&self.out, journal.outcomes(), &samples, &model)?;
        }
        tables::print(journal.outcomes())?;
        let files = format!("{OUTCOMES}, {RUNS}.csv, table.csv and table.md are in {}", self.out.display());
        exit::print(&format!("{files}\n\n{}\n", machine::describe(model.decoder.device())))
    }

    fn journal(&self) -> Result<Journal> {
        fs::create_dir_all(&self.out).with_context(|| format!("cannot write {}", self.out.display()))?;
        let path = self.out.join(OUTCOMES);
        if !self.fresh {
            return Journal::open(path).map_err(with_way_out);
        }
        let journal = Journal::fresh(path)?;
        let runs = self.out.join(RUNS).with_extension("csv");
        match fs::remove_file(&runs) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot write {}", runs.display()))
            }
            _ => Ok(journal),
        }
    }

    /// Prints the settings of the run. Most differences between published scores come from a wrong template.
    fn announce(
        &self,
        model: &LoadedModel,
        asked: Option<ChatTemplate>,
        found: ChatTemplate,
        samples: &[Sample],
        journal: &Journal,
    ) -> Result<()> {
        let template = match asked {
            Some(template) => format!("{template}: {:?}", template.pattern()),
            None => format!("{found} (auto): {:?}", found.pattern()),
        };
        let there = match journal.outcomes().len() {
            0 => String::new(),
            count => format!(", {count} outcomes exist"),
        };
        exit::print(&format!(
            "model     {}\ntemplate  {template}\nrun       {} samples, {}, chunk {}{there}\n\n",
            model_flags::describe(model),
            samples.len(),
            self.methods.join(", "),
            self.chunk.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        ))
    }

    fn go(&self, runner: &Runner, samples: &[Sample], journal: &mut Journal, origin: &Provenance) -> Result<()> {
        let trials = runner.pending(samples, journal).map_err(with_way_out)?;
        let count = trials.len();
        if count == 0 {
            return Ok(());
        }
        // Written before the first outcome, because an interrupted run has outcomes too.
        record::append(&self.out, RUNS, &[RunRecord { outcomes: count }], origin)?;
        // In tokens, because long prompts take longer.
        let tokens = trials.iter().map(|trial| trial.sample.context_tokens() as u64).sum();
        let phase = progress::start_with_eta(format!("{count} outcomes"), tokens, "tokens");
        let result = runner.run(&trials, journal, &mut |event| show(&phase, event));
        phase.finish();
        Ok(result?)
    }
}

fn show(phase: &Progress, event: Event) {
    match event {
        Event::Started(trial) => {
            let (task, tokens) = (trial.sample.task(), trial.sample.context_tokens());
            phase.name_step(format!("{task} {tokens}, {}", trial.key.method));
        }
        Event::Finished(outcome) => phase.add(outcome.context_tokens),
    }
}

fn template(name: &str) -> Result<ChatTemplate> {
    name.parse().map_err(|_| {
        let names = ChatTemplate::ALL.map(|template| template.to_string()).join(", ");
        anyhow::anyhow!("--template: expected auto, {names}, got {name}")
    })
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
