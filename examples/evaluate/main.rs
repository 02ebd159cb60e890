//! Tasks and experiments: what sparse attention costs in answers and in error, and what it saves.
//!
//! ```text
//! cargo run --release --example evaluate -- run                                     # built-in model, a minute
//! cargo run --release --example evaluate -- run --tasks ruler --lengths 4096,32768 --model meta-llama/Llama-3.1-8B-Instruct
//! cargo run --release --example evaluate -- run --methods dense,s2o,s2o:tau=0.05,sliding-window --tasks niah --depths 0,0.5,1
//! cargo run --release --example evaluate -- list
//! cargo run --release --example evaluate -- report evaluation
//! cargo run --release --example evaluate -- experiment matched-density           # three layers of the built-in model
//! cargo run --release --example evaluate -- experiment time-split --tensors qkv.safetensors --repeat 5 --out results
//! cargo run --release --example evaluate -- tune --max-rel-l1 0.05 --model DIR --prompt-file F --save layers.json
//! cargo run --release --example evaluate -- tune-spargeattn --l1 0.05 --l2 0.06 --model DIR --prompt-file F --save spargeattn.json
//! ```

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "prefill needs more of it")]
mod cli;
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

/// Evaluates attention methods: on long-context tasks, and by the experiments of the S2O paper.
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
    /// Error, density and time of attention methods on the queries, keys and values of single layers
    Experiment(experiment::Flags),
    /// Find a threshold for each layer that keeps its error within a bound
    Tune(tune::Flags),
    /// Find SpargeAttn's settings for each layer and head that keep a head's error within bounds
    TuneSpargeattn(tune_spargeattn::Flags),
    /// Find MInference's pattern for each head
    SearchMinference(search_minference::Flags),
}

fn main() -> ExitCode {
    cli::exit::with(match Flags::parse().command {
        Command::Run(flags) => flags.run(),
        Command::List(flags) => flags.run(),
        Command::Report(flags) => flags.run(),
        Command::Experiment(flags) => experiment::run(&flags),
        Command::Tune(flags) => tune::run(&flags),
        Command::TuneSpargeattn(flags) => tune_spargeattn::run(&flags),
        Command::SearchMinference(flags) => search_minference::run(&flags),
    })
}
