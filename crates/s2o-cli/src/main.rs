//! `s2o`: sparse attention for long prompts (S2O) in a model, next to dense attention and other published methods.
//!
//! `s2o --help` lists the commands; docs/experiments.md describes those of `s2o evaluate`.

use std::error::Error;
use std::ffi::OsStr;
use std::num::{IntErrorKind, NonZeroUsize, ParseFloatError, ParseIntError};
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};
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
  s2o evaluate run --tasks ruler --lengths 16384,32768 --methods dense,s2o,xattention

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
    let matches =
        adjusted(Program::command()).try_get_matches().unwrap_or_else(|error| with_expected_number(error).exit());
    let program = match Program::from_arg_matches(&matches) {
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

/// Adjusts what clap's attributes cannot express, for the flags of all commands.
fn adjusted(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| with_commas(with_negative_numbers(arg))).mut_subcommands(adjusted)
}

/// Lets a flag take a negative number as its value, so that the error says what the flag expects.
fn with_negative_numbers(arg: clap::Arg) -> clap::Arg {
    if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg }
}

/// Shows the default of a list as a user types it. clap separates the values by spaces.
fn with_commas(arg: clap::Arg) -> clap::Arg {
    let default = arg.get_default_values().join(OsStr::new(","));
    match (arg.get_help(), arg.get_value_delimiter(), arg.get_default_values().len()) {
        (Some(help), Some(','), 2..) => {
            let help = format!("{help} [default: {}]", default.display());
            arg.help(help).hide_default_value(true)
        }
        _ => arg,
    }
}

/// Says which number a flag expects, where the standard library's error says only what is wrong with the text.
fn with_expected_number(error: clap::Error) -> clap::Error {
    let source = error.source();
    let expected = match source.and_then(|source| source.downcast_ref::<ParseIntError>()).map(ParseIntError::kind) {
        Some(IntErrorKind::Zero) => "a whole number from 1 on",
        Some(IntErrorKind::PosOverflow) => "a smaller whole number",
        Some(_) => "a whole number from 0 on",
        None if source.is_some_and(|source| source.is::<ParseFloatError>()) => "a number",
        None => return error,
    };
    match (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue)) {
        (Some(flag), Some(got)) => {
            let message = format!("invalid value '{got}' for '{flag}': expected {expected}");
            clap::Error::raw(ErrorKind::ValueValidation, message + "\n\nFor more information, try '--help'.\n")
        }
        _ => error,
    }
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
