//! `s2o evaluate`: effect of sparse attention on answers and on error, and the time that it saves.

use anyhow::Result;
use clap::{Args, Subcommand};

mod experiment;
mod list;
mod record;
mod report;
mod run;
mod samples;
mod search_minference;
mod tables;
mod tune;
mod tune_spargeattn;
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
    List(list::Flags),
    Report(report::Flags),
    Experiment(experiment::Flags),
    Tune(tune::Flags),
    TuneSpargeattn(tune_spargeattn::Flags),
    SearchMinference(search_minference::Flags),
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        match &self.command {
            Command::Run(flags) => flags.run(),
            Command::List(flags) => flags.run(),
            Command::Report(flags) => flags.run(),
            Command::Experiment(flags) => experiment::run(flags),
            Command::Tune(flags) => tune::run(flags),
            Command::TuneSpargeattn(flags) => tune_spargeattn::run(flags),
            Command::SearchMinference(flags) => search_minference::run(flags),
        }
    }
}
