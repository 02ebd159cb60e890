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
use candle_core::DType;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use s2o_eval::capture::{LayerTensors, save_layers, save_tensors, tensor_name};
use s2o_eval::method::{Method, MethodSpec};

#[path = "../cli/mod.rs"]
#[allow(dead_code, reason = "prefill needs more of it")]
mod cli;
mod peers;
mod rows;
mod verdict;

use cli::layout::Look;
use cli::s2o_flags::S2oFlags;
use cli::tensor_flags::TensorFlags;
use cli::{exit, machine};
use peers::Peer;
use rows::Contender;

/// Runs attention methods on the same q, k, v and compares their outputs with dense attention's, ours or another's, per
/// head and in total.
///
/// The tensors come from a file (--tensors) or from a model's prefill; without arguments, from the built-in model on a
/// passkey prompt of 8192 tokens.
#[derive(Debug, Parser)]
#[command(name = "compare")]
struct Flags {
    #[command(flatten)]
    source: TensorFlags,
    /// Exact attention to compare with instead of our dense, in output and time; the verdict is printed under the table
    #[arg(long, value_name = "NAME")]
    against: Option<Peer>,
    /// Methods to compare, with options such as `s2o:tau=0.05` or `sliding-window:window=4096`; plain `s2o` goes by the
    /// S2O flags
    #[arg(long, value_name = "METHODS", value_delimiter = ',', default_values = ["dense", "s2o"])]
    methods: Vec<MethodSpec>,
    /// Times each method runs; the median time is reported
    #[arg(long, value_name = "N", default_value = "1")]
    repeat: NonZeroUsize,
    /// Write the captured q, k, v to this file, for --tensors
    #[arg(long, value_name = "FILE", conflicts_with = "tensors")]
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
    s2o: S2oFlags,
}

/// The method that the S2O flags are about.
const PLAIN_S2O: &str = "s2o";

fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.s2o.any() && !flags.methods.iter().any(|spec| spec.to_string() == PLAIN_S2O) {
        let text = "the S2O flags have no effect without 's2o' in '--methods'";
        Flags::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    exit::with(compare(&flags))
}

fn compare(flags: &Flags) -> Result<()> {
    machine::limit_threads(flags.threads);
    let device = flags.source.model.device()?;
    let reference = || peers::reference(flags.against, &device).map(Contender::from);
    let mut methods = flags.methods.iter().map(|spec| flags.contender(spec)).collect::<Result<Vec<_>>>()?;
    if flags.against.is_some() {
        methods.insert(0, reference()?);
    }
    let reference = reference()?;
    let mut csv = match &flags.csv {
        Some(path) => Some(csv::Writer::from_path(path).with_context(|| format!("cannot write {}", path.display()))?),
        None => None,
    };

    let mut source = flags.source.open(|model| flags.s2o.check_layers(model.config().num_layers))?;
    if let Some(path) = &flags.save_tensors {
        let layers = source.layers.collect::<Result<Vec<LayerTensors>>>()?;
        save_layers(path, &layers)?;
        source.layers = Box::new(layers.into_iter().map(Ok));
    }
    let (mut all_rows, mut outputs) = (Vec::new(), HashMap::new());
    let mut dtype = DType::F32;
    for layer in source.layers {
        let layer = layer?;
        dtype = layer.q.dtype();
        let mut keep = |name: &str, output| {
            if flags.out_tensors.is_some() {
                outputs.insert(tensor_name(name, layer.layer, source.count), output);
            }
        };
        let rows = rows::compare(&layer, &methods, &reference, flags.repeat.get(), &mut keep)?;
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
        save_tensors(path, outputs, None)?;
    }
    if !flags.json {
        let look = Look::of_stdout();
        let table = rows::table(&all_rows, look);
        // Apart from the progress bars.
        let gap = if look == Look::Terminal { "\n" } else { "" };
        let (header, footer) = (source.description, machine::describe(&source.device));
        let mut verdict = String::new();
        if flags.against.is_some() {
            for line in verdict::lines(&all_rows, &reference.name, dtype) {
                writeln!(verdict, "{line}")?;
            }
            verdict.push('\n');
        }
        exit::print(&format!("{gap}{header}\n\n{table}\n\n{verdict}{footer}\n"))?;
    }
    Ok(())
}

impl Flags {
    fn contender(&self, spec: &MethodSpec) -> Result<Contender> {
        let name = spec.to_string();
        let method: Box<dyn Method> = if name == PLAIN_S2O { Box::new(self.s2o.attention()?) } else { spec.build()? };
        Ok(Contender { name, method })
    }
}
