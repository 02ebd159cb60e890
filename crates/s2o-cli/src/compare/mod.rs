//! S2O compared with dense attention on given tensors: density, error and time.

use std::collections::HashMap;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_core::DType;
use clap::Args;
use s2o_eval::capture::{LayerTensors, save_layers, save_tensors, tensor_name};
use s2o_eval::method::{Method, MethodSpec};

mod peers;
mod rows;

use self::peers::Peer;
use self::rows::Contender;
use crate::evaluate::record;
use crate::layout::Look;
use crate::s2o_flags::S2oFlags;
use crate::tensor_flags::TensorFlags;
use crate::{exit, machine, writable, wrong_usage};

/// Compare outputs and times of attention methods on the same q, k, v, per head and in total
///
/// The tensors come from a file (--tensors) or from a model's prefill. Without arguments they come from the built-in
/// model on a passkey prompt of 8192 tokens.
#[derive(Debug, Args)]
pub struct Flags {
    /// Exact attention of another crate as reference; prints a verdict under the table [default: our dense attention]
    #[arg(long, value_name = "NAME")]
    against: Option<Peer>,
    /// Methods to compare, with options such as `s2o:tau=0.05` or `sliding-window:window=4096`; plain `s2o` uses the
    /// S2O flags
    #[arg(long, value_name = "METHODS", value_delimiter = ',', default_values = ["dense", "s2o"])]
    methods: Vec<MethodSpec>,
    /// Runs of each method; the median time is reported
    #[arg(long, value_name = "N", default_value = "1")]
    repeat: NonZeroUsize,
    /// Write the captured q, k, v to this file, for --tensors
    #[arg(long, value_name = "FILE", conflicts_with = "tensors")]
    save_tensors: Option<PathBuf>,
    /// Write each method's output to this file, under the method's name
    #[arg(long, value_name = "FILE")]
    out_tensors: Option<PathBuf>,
    /// Also write the rows to this file as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
    // After the own flags: a heading of flattened flags holds for all flags after them.
    #[command(flatten)]
    source: TensorFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

/// The method that the S2O flags apply to.
const PLAIN_S2O: &str = "s2o";

impl Flags {
    pub fn run(&self) -> Result<()> {
        let has_s2o = self.methods.iter().any(|spec| spec.to_string() == PLAIN_S2O);
        if let Some(given) = self.s2o.given().filter(|_| !has_s2o) {
            wrong_usage("compare", &format!("{given}: no effect without 's2o' in '--methods'"));
        }
        let device = self.source.model.device()?;
        let reference = || peers::reference(self.against, &device).map(Contender::from);
        let mut methods = self.methods.iter().map(|spec| self.contender(spec)).collect::<Result<Vec<_>>>()?;
        if self.against.is_some() {
            methods.insert(0, reference()?);
        }
        let reference = reference()?;
        let create = |path: &PathBuf| csv::Writer::from_path(path).with_context(|| writable::cannot_write(path));
        let mut csv = self.csv.as_ref().map(create).transpose()?;
        self.save_tensors.iter().chain(&self.out_tensors).try_for_each(|path| writable::file(path))?;

        let mut source = self.source.open(|model| self.s2o.check_layers(model.config().num_layers))?;
        if let Some(path) = &self.save_tensors {
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
                if self.out_tensors.is_some() {
                    outputs.insert(tensor_name(name, layer.layer, source.count), output);
                }
            };
            let rows = rows::compare(&layer, &methods, &reference, self.repeat.get(), &mut keep)?;
            if let Some(csv) = &mut csv {
                rows.iter().try_for_each(|row| csv.serialize(row))?;
                csv.flush()?;
            }
            if self.json {
                exit::print(&record::json_lines(&rows)?)?;
            }
            all_rows.extend(rows);
        }
        if let Some(path) = &self.out_tensors {
            save_tensors(path, outputs, None)?;
        }
        if !self.json {
            let look = Look::of_stdout();
            let table = rows::table(&all_rows, look);
            let (gap, header, footer) = (look.gap(), source.description, machine::describe(&source.device));
            let mut verdict = String::new();
            if self.against.is_some() {
                for line in rows::verdict(&all_rows, &reference.name, dtype) {
                    writeln!(verdict, "{line}")?;
                }
                verdict.push('\n');
            }
            exit::print(&format!("{gap}{header}\n\n{table}\n\n{verdict}{footer}\n"))?;
        }
        Ok(())
    }

    fn contender(&self, spec: &MethodSpec) -> Result<Contender> {
        let name = spec.to_string();
        let method: Box<dyn Method> = if name == PLAIN_S2O { Box::new(self.s2o.attention()?) } else { spec.build()? };
        Ok(Contender { name, method })
    }
}
