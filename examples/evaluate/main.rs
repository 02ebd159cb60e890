//! Experiments of the S2O paper and a threshold for every layer, on the built-in model, your model or your tensors.
//!
//! ```text
//! cargo run --release --example evaluate -- experiment matched-density           # three layers of the built-in model
//! cargo run --release --example evaluate -- experiment time-split --tensors qkv.safetensors --repeat 5 --out results
//! cargo run --release --example evaluate -- tune --max-rel-l1 0.05 --model DIR --prompt-file F --save layers.json
//! cargo run --release --example evaluate -- --help
//! ```

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "prefill needs more of it")]
mod cli;
mod experiment;
mod record;
mod tune;

use cli::exit;

/// Evaluates attention methods: the experiments of the S2O paper as commands, and a tuner.
#[derive(Debug, Parser)]
#[command(name = "evaluate")]
struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Error, density and time of attention methods on the queries, keys and values of single layers
    Experiment(experiment::Flags),
    /// Find a threshold for each layer that keeps its error within a bound
    Tune(tune::Flags),
}

fn main() -> ExitCode {
    exit::with(match Flags::parse().command {
        Command::Experiment(flags) => experiment::run(&flags),
        Command::Tune(flags) => tune::run(&flags),
    })
}
