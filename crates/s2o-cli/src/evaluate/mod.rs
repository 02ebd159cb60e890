//! `s2o evaluate`: effect of sparse attention on answers and on error, and the time that it saves.

use std::fmt::Write;

use anyhow::Result;
use clap::{Args, Subcommand};
use s2o_eval::load::NEEDLE_7M;
use s2o_eval::run::GROUPS;
use s2o_eval::{method, tasks};

mod estimate;
mod experiment;
pub mod record;
mod report;
mod run;
mod samples;
mod tables;
mod tune;
mod tune_published;
mod tuning;

use self::samples::PERPLEXITY;
use crate::exit;

/// Evaluate attention methods on long-context tasks and by the experiments of the S2O paper
#[derive(Debug, Args)]
pub struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Flags>),
    /// List tasks and methods
    List,
    Report(report::Flags),
    Experiment(experiment::Flags),
    Tune(tune::Flags),
    TuneSpargeattn(tune_published::SpargeFlags),
    SearchMinference(tune_published::MInferenceFlags),
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        match &self.command {
            Command::Run(flags) => flags.run(),
            Command::List => list(),
            Command::Report(flags) => flags.run(),
            Command::Experiment(flags) => flags.run(),
            Command::Tune(flags) => flags.run(),
            Command::TuneSpargeattn(flags) => flags.run(),
            Command::SearchMinference(flags) => flags.run(),
        }
    }
}

fn list() -> Result<()> {
    let mut text = String::from("Tasks, for --tasks; for those with * --depths sets the place of the answer\n");
    for task in tasks::ALL {
        let mark = if task.takes_depth { '*' } else { ' ' };
        writeln!(text, "  {:<17}{mark} {}", task.name, task.summary)?;
    }
    writeln!(text, "  {NEEDLE_7M:<17}  the 30 recorded prompts of the model needle-7m, of 4096 and 32768 tokens")?;
    writeln!(text, "  {PERPLEXITY:<17}  perplexity of English text that comes with needle-7m")?;
    text.push_str("\nSeveral tasks under one name\n");
    for group in GROUPS {
        writeln!(text, "  {:<17}  {}", group.name, group.summary)?;
    }
    text.push_str("\nMethods, for --methods, with their options as in s2o:tau=0.05:segment=1024\n");
    for row in method::ALL {
        writeln!(text, "  {:<17}  {}", row.name, row.summary)?;
        let options = row.options();
        if !options.is_empty() {
            writeln!(text, "  {:<17}  options: {}", "", options.join(", "))?;
        }
    }
    exit::print(&text)
}
