//! `s2o`: sparse attention for long prompts (S2O) in a model, next to dense attention and other published methods.
//!
//! `s2o --help` lists the commands; docs/experiments.md describes those of `s2o evaluate`.

use std::num::NonZeroUsize;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

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
    let program = match Program::from_arg_matches(&with_negative_numbers(Program::command()).get_matches()) {
        Ok(program) => program,
        Err(error) => error.exit(),
    };
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

/// Lets every flag take a negative number as its value, so that the error says what the flag expects.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let takes = |arg: clap::Arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg };
    command.mut_args(takes).mut_subcommands(with_negative_numbers)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags without a default: files, texts and ranks that nobody needs to name.
    const OPTIONAL: &[&str] = &[
        "csv",
        "densities",
        "infinitebench-dir",
        "layers-file",
        "longbench-file",
        "out",
        "out-tensors",
        "prompt",
        "prompt-file",
        "rank",
        "rendezvous",
        "ruler-dir",
        "save-tensors",
        "synthetic",
        "tensors",
        "text-file",
        "tokens",
        "world-size",
    ];

    fn without_default(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
            let help = [arg.get_help(), arg.get_long_help()].into_iter().flatten().map(ToString::to_string);
            let says = help.into_iter().any(|help| help.contains("[default"));
            let name = arg.get_long().unwrap_or(arg.get_id().as_str());
            if !says && arg.get_default_values().is_empty() && !arg.is_required_set() && !OPTIONAL.contains(&name) {
                found.push(format!("{path} --{name}"));
            }
        }
        for part in command.get_subcommands().filter(|part| part.get_name() != "help") {
            without_default(part, &format!("{path} {}", part.get_name()), found);
        }
    }

    #[test]
    fn the_help_of_a_flag_says_its_default() {
        let mut found = Vec::new();
        without_default(&Program::command(), "s2o", &mut found);
        assert!(found.is_empty(), "no [default: ..] in the help of {found:#?}");
    }
}
