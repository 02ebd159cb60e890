//! `s2o`: sparse attention for long prompts (S2O) in a model, next to dense attention and other published methods.
//!
//! `s2o --help` lists the commands; docs/experiments.md describes those of `s2o evaluate`.

use std::num::NonZeroUsize;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

mod compare;
mod evaluate;
mod exit;
mod heatmap;
mod layout;
mod machine;
mod model_flags;
mod prefill;
mod progress;
mod prompt_flags;
mod ranks;
mod s2o_flags;
mod statistics;
mod tensor_flags;
mod writable;

const EXAMPLES: &str = "\
Examples:
  s2o prefill                         the built-in model, a passkey prompt of 8192 tokens, dense and S2O
  s2o prefill --context 32768 --tau 0.05
  s2o prefill --model meta-llama/Llama-3.1-8B-Instruct --prompt-file book.txt --compare
  s2o compare --tensors qkv.safetensors
  s2o evaluate run --tasks ruler --lengths 4096,32768 --methods dense,s2o,xattention

`s2o COMMAND --help` lists the options of a command.";

/// Sparse attention for long prompts (S2O), in a model and measured against dense attention and other methods
///
/// Start with `s2o prefill`, which needs no files: a small model is built in. Other models (Llama and Qwen3) come from
/// a directory, a .gguf file or the Hugging Face hub.
#[derive(Debug, Parser)]
#[command(name = "s2o", version, after_help = EXAMPLES)]
struct Program {
    #[command(subcommand)]
    command: Command,
    /// Threads to use [default: all]
    #[arg(long, global = true, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Show no progress on stderr
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Prefill(Box<prefill::Flags>),
    Compare(Box<compare::Flags>),
    Evaluate(Box<evaluate::Flags>),
    Heatmap(Box<heatmap::Flags>),
    Statistics(Box<statistics::Flags>),
}

fn main() -> ExitCode {
    let program = Program::parse();
    if let Some(threads) = program.threads {
        s2o_eval::limit_threads(threads);
    }
    progress::init(program.quiet);
    exit::with(match &program.command {
        Command::Prefill(flags) => flags.run(),
        Command::Compare(flags) => flags.run(),
        Command::Evaluate(flags) => flags.run(),
        Command::Heatmap(flags) => flags.run(),
        Command::Statistics(flags) => flags.run(),
    })
}

/// Ends the program with a usage error of `command` that clap's attributes cannot express.
fn wrong_usage(command: &str, message: &str) -> ! {
    let mut program = Program::command();
    program.build();
    let error = match program.find_subcommand_mut(command) {
        Some(command) => command.error(ErrorKind::ArgumentConflict, message),
        None => program.error(ErrorKind::ArgumentConflict, message),
    };
    error.exit()
}
