//! S2O against dense attention on given tensors: what it computes, how far off it is, and how long it takes.
//!
//! ```text
//! cargo run --release --example compare                                        # three layers of the built-in model
//! cargo run --release --example compare -- --tensors qkv.safetensors --json    # q, k, v as (batch, len, heads, dim)
//! cargo run --release --example compare -- --model DIR --prompt-file F --layers 0,5 --save-tensors qkv.safetensors
//! cargo run --release --example compare -- --against sdpa-dense                # ours against Candle's own ops
//! cargo run --release --example compare --features cuda,flash-attn -- --against flash-attn --context 32768
//! cargo run --release --example compare -- --help
//! ```

use std::collections::HashMap;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

mod capture;
#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "prefill needs more of it")]
mod cli;
mod methods;
mod peers;
mod rows;
mod tensors;
mod verdict;

use cli::layout::Look;
use cli::model_flags::ModelFlags;
use cli::prompt_flags::PromptFlags;
use cli::s2o_flags::S2oFlags;
use cli::{exit, machine, model_flags};
use methods::Method;
use peers::Peer;
use tensors::{LayerTensors, TensorFile};

/// Runs attention methods on the same q, k, v and compares their outputs with dense attention's, ours or another's, per
/// head and in total.
///
/// The tensors come from a file (--tensors) or from a model's prefill; without arguments, from the built-in model on a
/// passkey prompt of 8192 tokens.
#[derive(Debug, Parser)]
#[command(name = "compare")]
struct Flags {
    /// A safetensors file with q, k, v, each (batch, length, heads, head_dim) in f32, f16 or bf16, or layer.N.q and so
    /// on for several layers; an optional tensor softmax_scale holds one number
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "model", "revision", "tokenizer_file", "dtype", "chunk", "prompt", "prompt_file", "passkey", "context", "depth",
        "seed", "save_tensors", "synthetic", "synthetic_weights", "synthetic_focus", "tokens",
    ])]
    tensors: Option<PathBuf>,
    /// Layers to compare, such as `0,5` [default: all of a file; the first, middle and last of a model]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    layers: Vec<usize>,
    /// Exact attention to compare with instead of our dense, in output and time; the verdict is printed under the table
    #[arg(long, value_name = "NAME")]
    against: Option<Peer>,
    /// Methods to compare
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values = ["dense", "s2o"],
        value_parser = PossibleValuesParser::new(methods::names()))]
    methods: Vec<String>,
    /// Times each method runs; the median time is reported
    #[arg(long, value_name = "N", default_value = "1")]
    repeat: NonZeroUsize,
    /// Write the captured q, k, v to this file, for --tensors
    #[arg(long, value_name = "FILE")]
    save_tensors: Option<PathBuf>,
    /// Write each method's output to this file, under the method's name
    #[arg(long, value_name = "FILE")]
    out_tensors: Option<PathBuf>,
    /// Write the rows to this file as CSV too
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
    /// Threads to use [default: all]
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    prompt: PromptFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

/// Where the layers come from, and a line about it.
struct Source {
    layers: Box<dyn Iterator<Item = Result<LayerTensors>>>,
    count: usize,
    description: String,
    device: Device,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.s2o.any() && !flags.methods.iter().any(|name| name == "s2o") {
        let text = "the S2O flags have no effect without 's2o' in '--methods'";
        Flags::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    exit::with(compare(&flags))
}

fn compare(flags: &Flags) -> Result<()> {
    machine::limit_threads(flags.threads);
    let device = flags.model.device()?;
    let reference = || peers::reference(flags.against, &device);
    let mut methods = methods::build(&flags.methods, &flags.s2o)?;
    if flags.against.is_some() {
        methods.insert(0, reference()?);
    }
    let reference: Box<dyn Method> = reference()?;
    let mut csv = match &flags.csv {
        Some(path) => Some(csv::Writer::from_path(path).with_context(|| format!("cannot write {}", path.display()))?),
        None => None,
    };

    let source = flags.source()?;
    let (mut all_rows, mut outputs) = (Vec::new(), HashMap::new());
    let mut dtype = DType::F32;
    for layer in source.layers {
        let layer = layer?;
        dtype = layer.q.dtype();
        let mut keep = |name: &str, output| {
            if flags.out_tensors.is_some() {
                outputs.insert(tensors::name(name, layer.layer, source.count), output);
            }
        };
        let rows = rows::compare(&layer, &methods, reference.as_ref(), flags.repeat.get(), &mut keep)?;
        if let Some(csv) = &mut csv {
            rows.iter().try_for_each(|row| csv.serialize(row))?;
            csv.flush()?;
        }
        if flags.json {
            let mut lines = String::new();
            for row in &rows {
                writeln!(lines, "{}", serde_json::to_string(row)?)?;
            }
            exit::print(&lines)?;
        }
        all_rows.extend(rows);
    }
    if let Some(path) = &flags.out_tensors {
        tensors::write(path, outputs, None)?;
    }
    if !flags.json {
        let look = Look::of_stdout();
        let table = rows::table(&all_rows, look);
        // Apart from the progress bars.
        let gap = if look == Look::Terminal { "\n" } else { "" };
        let (header, footer) = (source.description, machine::describe(&source.device));
        let mut verdict = String::new();
        if flags.against.is_some() {
            for line in verdict::lines(&all_rows, reference.name(), dtype) {
                writeln!(verdict, "{line}")?;
            }
            verdict.push('\n');
        }
        exit::print(&format!("{gap}{header}\n\n{table}\n\n{verdict}{footer}\n"))?;
    }
    Ok(())
}

impl Flags {
    fn source(&self) -> Result<Source> {
        if let Some(path) = &self.tensors {
            let file = TensorFile::open(path)?;
            let layers = file.choose(&self.layers)?;
            let device = self.model.device()?;
            return Ok(Source {
                count: layers.len(),
                description: format!("tensors {}", path.display()),
                device: device.clone(),
                layers: Box::new(layers.into_iter().map(move |layer| Ok(file.load(layer, &device)?))),
            });
        }
        let model = self.model.load()?;
        self.s2o.check_layers(model.config().num_layers)?;
        let prompt = self.prompt.prompt(&model)?;
        let layers = capture::capture(&model, &prompt.tokens, self.model.chunk, &self.layers)?;
        if let Some(path) = &self.save_tensors {
            tensors::save_layers(path, &layers)?;
        }
        Ok(Source {
            count: layers.len(),
            description: format!("model   {}\nprompt  {}", model_flags::describe(&model), prompt.description),
            device: model.decoder.device().clone(),
            layers: Box::new(layers.into_iter().map(Ok)),
        })
    }
}
