//! Tasks, methods and models: what sparse attention costs in answers.
//!
//! ```text
//! cargo run --release --example evaluate -- run                                     # built-in model, a minute
//! cargo run --release --example evaluate -- run --tasks ruler --lengths 4096,32768 --model meta-llama/Llama-3.1-8B-Instruct
//! cargo run --release --example evaluate -- run --methods dense,s2o,s2o:tau=0.05,sliding-window --tasks niah --depths 0,0.5,1
//! cargo run --release --example evaluate -- list
//! cargo run --release --example evaluate -- report evaluation
//! ```

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "prefill needs more of it")]
mod cli;
mod list;
mod report;
mod run;
mod samples;
mod tables;

/// Evaluates attention methods on long-context tasks.
#[derive(Debug, Parser)]
#[command(name = "evaluate")]
struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Flags>),
    List(list::Flags),
    Report(report::Flags),
}

fn main() -> ExitCode {
    cli::exit::with(match Flags::parse().command {
        Command::Run(flags) => flags.run(),
        Command::List(flags) => flags.run(),
        Command::Report(flags) => flags.run(),
    })
}
