//! Long-context prefill, dense and with S2O: how long it takes, how much of attention is computed, and what it changes.
//!
//! ```text
//! cargo run --release --example prefill                                    # built-in model, 8K passkey, side by side
//! cargo run --release --example prefill -- --context 32768 --tau 0.05
//! cargo run --release --example prefill -- --model meta-llama/Llama-3.1-8B --dtype bf16 --context 131072
//! cargo run --release --example prefill -- --model model.gguf --prompt-file book.txt -n 200
//! cargo run --release --features cuda --example prefill -- --synthetic llama-3.1-8b --tokens 131072
//! cargo run --release --example prefill -- --help
//! ```

use std::num::NonZeroUsize;
use std::process::ExitCode;

use anyhow::Result;
use candle_s2o::Dense;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, ValueEnum};
use s2o_models::GenerationOptions;
use tracing_chrome::ChromeLayerBuilder;
use tracing_subscriber::prelude::*;

#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "others need more of it")]
mod cli;
mod report;
mod run;
mod timed;

use cli::layout::Look;
use cli::model_flags::ModelFlags;
use cli::prompt_flags::PromptFlags;
use cli::s2o_flags::S2oFlags;
use cli::{exit, machine};
use report::Report;
use run::Session;

/// Prefills a long prompt with dense or S2O attention, or both side by side, and generates from it.
///
/// Without arguments: the built-in model on a passkey prompt of 8192 tokens, both methods. With a prompt of your own,
/// S2O alone unless --compare is given.
#[derive(Debug, Parser)]
#[command(name = "prefill")]
struct Flags {
    /// Run this attention alone, unless --compare is given
    #[arg(long, value_name = "METHOD")]
    attention: Option<Method>,
    /// Run dense and S2O side by side; the default but for a prompt of your own
    #[arg(long)]
    compare: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Threads to use [default: all]
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Write the time spent in each layer as a Chrome trace (trace-TIMESTAMP.json)
    #[arg(long)]
    tracing: bool,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    prompt: PromptFlags,
    #[command(flatten)]
    s2o: S2oFlags,
    #[command(flatten)]
    generation: GenerationFlags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    S2o,
    Dense,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Generation")]
struct GenerationFlags {
    /// Tokens to generate at most [default: 256 for a prompt of your own, else 24]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    sample_len: Option<usize>,
    /// Temperature of sampling; 0 takes the likeliest token [default: 0]
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample among the likeliest tokens that together reach this probability
    #[arg(long, requires = "temperature")]
    top_p: Option<f64>,
    /// Sample among this many likeliest tokens
    #[arg(long, requires = "temperature")]
    top_k: Option<usize>,
    /// Penalty on tokens that occurred lately; 1 is none
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// How many tokens back the penalty looks
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    repeat_last_n: usize,
}

impl Flags {
    /// The methods to run, dense first.
    fn methods(&self) -> &'static [Method] {
        match self.attention {
            _ if self.compare => &[Method::Dense, Method::S2o],
            Some(Method::Dense) => &[Method::Dense],
            Some(Method::S2o) => &[Method::S2o],
            None if self.prompt.is_own() => &[Method::S2o],
            None => &[Method::Dense, Method::S2o],
        }
    }

    /// What clap's attributes cannot say.
    fn check(&self) {
        if self.methods() == [Method::Dense] && self.s2o.any() {
            let text = "the S2O flags have no effect with '--attention dense'";
            Self::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
    }

    fn generation(&self) -> GenerationOptions {
        let flags = &self.generation;
        GenerationOptions {
            max_new_tokens: flags.sample_len.unwrap_or(if self.prompt.is_own() { 256 } else { 24 }),
            temperature: flags.temperature,
            top_k: flags.top_k,
            top_p: flags.top_p,
            seed: self.prompt.seed,
            repeat_penalty: flags.repeat_penalty,
            repeat_last_n: flags.repeat_last_n,
        }
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    flags.check();
    exit::with(prefill(&flags))
}

fn prefill(flags: &Flags) -> Result<()> {
    machine::limit_threads(flags.threads);
    // Written when it is dropped, at the end.
    let _trace = flags.tracing.then(|| {
        let (layer, guard) = ChromeLayerBuilder::new().include_args(true).build();
        tracing_subscriber::registry().with(layer).init();
        guard
    });
    // Before the model: a wrong option should not cost the loading of 16 GB.
    let s2o = flags.s2o.attention()?;
    let methods = flags.methods();

    let model = flags.model.load()?;
    flags.s2o.check_layers(model.config().num_layers)?;
    let prompt = flags.prompt.prompt(&model)?;

    let streams = !flags.json && methods.len() == 1;
    let mut session = Session::new(&model, &prompt.tokens, flags.model.chunk, flags.generation())?;
    if methods.len() > 1 {
        session.compares(&[&Dense, &s2o])?;
    }
    let mut on_text = |text: &str| if streams { exit::print(text) } else { Ok(()) };
    let mut report =
        Report { model: &model, prompt: &prompt, s2o: &s2o, by_layer: flags.s2o.by_layer(), dense: None, sparse: None };
    for method in methods {
        match method {
            Method::Dense => report.dense = Some(session.run("dense", &Dense, &mut on_text)?),
            Method::S2o => {
                report.sparse = Some((session.run("S2O", &s2o, &mut on_text)?, s2o.take_stats()));
            }
        }
    }
    drop(session);
    if flags.json {
        exit::print(&format!("{}\n", serde_json::to_string(&report.json()?)?))
    } else {
        let look = Look::of_stdout();
        // Apart from the generated text, or from the progress bars.
        let gap = match look {
            _ if streams => "\n\n",
            Look::Terminal => "\n",
            Look::Plain => "",
        };
        exit::print(&format!("{gap}{}", report.text(look)?))
    }
}
