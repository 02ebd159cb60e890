//! `s2o evaluate`: effect of sparse attention on answers and on error, and the time that it saves.

use anyhow::Result;
use clap::{Args, Subcommand};

mod experiment;
mod list;
pub mod record;
mod run;
mod samples;
mod tables;
mod tune;
mod tune_published;
mod tuning;

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
    Report(run::ReportFlags),
    Experiment(experiment::Flags),
    Tune(tune::Flags),
    TuneSpargeattn(tune_published::SpargeFlags),
    SearchMinference(tune_published::MInferenceFlags),
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        match &self.command {
            Command::Run(flags) => flags.run(),
            Command::List => list::run(),
            Command::Report(flags) => flags.run(),
            Command::Experiment(flags) => flags.run(),
            Command::Tune(flags) => flags.run(),
            Command::TuneSpargeattn(flags) => flags.run(),
            Command::SearchMinference(flags) => flags.run(),
        }
    }
}
