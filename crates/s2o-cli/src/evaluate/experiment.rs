//! `evaluate experiment`: the paper's operator-level experiments.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use s2o_eval::Provenance;
use s2o_eval::experiment::{
    Exact, components::components, heads::heads, matched_density, matched_speed::matched_speed,
    tau_and_segment::tau_and_segment, time_split::time_split,
};
use s2o_eval::method::{ALL, MethodSpec};
use serde::Serialize;

use super::record;
use crate::layout::Look;
use crate::tensor_flags::{Source, TensorFlags};
use crate::{exit, machine, progress, writable};

/// Measure error, density and time of attention methods on the queries, keys and values of single layers
#[derive(Debug, Args)]
pub struct Flags {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Error of all methods at the same density (the paper's Fig. 5a)
    MatchedDensity {
        #[command(flatten)]
        methods: Methods,
        /// Densities to compare at, each above 0 and below 1
        #[arg(long, value_name = "DENSITIES", value_delimiter = ',',
            default_values_t = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])]
        densities: Vec<f64>,
        #[command(flatten)]
        common: Common,
    },
    /// Time for selection and attention, with density and error (Fig. 5b and 1)
    TimeSplit {
        #[command(flatten)]
        methods: Methods,
        #[command(flatten)]
        repeat: Repeat,
        #[command(flatten)]
        common: Common,
    },
    /// S2O against random blocks of the same density (Fig. 6)
    MatchedSpeed {
        /// The method to sweep
        #[arg(long, value_name = "METHOD", default_value = "s2o")]
        method: MethodSpec,
        #[command(flatten)]
        repeat: Repeat,
        #[command(flatten)]
        common: Common,
    },
    /// Threshold and segment length of S2O (Table 2)
    TauAndSegment {
        /// The method for which tau and segment are set
        #[arg(long, value_name = "METHOD", default_value = "s2o")]
        method: MethodSpec,
        /// Thresholds
        #[arg(long, value_name = "TAUS", value_delimiter = ',',
            default_values_t = [0.001, 0.002, 0.004, 0.005, 0.01, 0.02, 0.05])]
        taus: Vec<f64>,
        /// Tokens in a segment
        #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [512, 1024, 2048, 4096])]
        segments: Vec<usize>,
        #[command(flatten)]
        repeat: Repeat,
        #[command(flatten)]
        common: Common,
    },
    /// Local window alone, with ranked keys, with ranked queries too (Table 3)
    Components {
        #[command(flatten)]
        repeat: Repeat,
        #[command(flatten)]
        common: Common,
    },
    /// Density by layer and head
    Heads {
        /// Methods, with options such as `s2o:tau=0.05`
        #[arg(long, value_name = "METHODS", value_delimiter = ',', default_values = ["s2o"])]
        methods: Vec<MethodSpec>,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Args)]
struct Methods {
    /// Methods, with options such as `s2o:tau=0.05` [default: all]
    #[arg(long, value_name = "METHODS", value_delimiter = ',')]
    methods: Vec<MethodSpec>,
}

#[derive(Debug, Args)]
struct Repeat {
    /// Runs of each method, alternating with the others; the medians are reported
    #[arg(long, value_name = "N", default_value = "3")]
    repeat: NonZeroUsize,
}

#[derive(Debug, Args)]
struct Common {
    /// Append the rows to one CSV file per experiment in this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    source: TensorFlags,
}

impl Methods {
    /// The given methods, or one of each row of the table.
    fn specs(&self) -> Result<Vec<MethodSpec>> {
        match self.methods.as_slice() {
            [] => Ok(ALL.iter().map(|row| row.name.parse()).collect::<Result<_, _>>()?),
            asked => Ok(asked.to_vec()),
        }
    }
}

/// Refuses invalid options before the model is loaded.
fn check(specs: &[MethodSpec]) -> Result<()> {
    specs.iter().try_for_each(|spec| Ok(spec.build().map(drop)?))
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        match &self.experiment {
            Experiment::MatchedDensity { methods, densities, common } => {
                if let Some(got) = densities.iter().find(|density| !(**density > 0.0 && **density < 1.0)) {
                    anyhow::bail!("--densities: expected numbers above 0 and below 1, got {got}");
                }
                let specs = methods.specs()?;
                check(&specs)?;
                let (rows, report) = common.layers(|exact| matched_density::sweep(exact, &specs))?;
                report.keep("sweep", &rows)?;
                report.rows("matched-density", &matched_density::at_densities(&rows, densities))
            }
            Experiment::TimeSplit { methods, repeat, common } => {
                let specs = methods.specs()?;
                check(&specs)?;
                common.report("time-split", |exact| time_split(exact, &specs, repeat.repeat))
            }
            Experiment::MatchedSpeed { method, repeat, common } => {
                check(std::slice::from_ref(method))?;
                common.report("matched-speed", |exact| matched_speed(exact, method, repeat.repeat))
            }
            Experiment::TauAndSegment { method, taus, segments, repeat, common } => {
                for tau in taus {
                    segments.iter().try_for_each(|s| check(&[method.clone().with("segment", s).with("tau", tau)]))?;
                }
                common.report("tau-and-segment", |exact| tau_and_segment(exact, method, taus, segments, repeat.repeat))
            }
            Experiment::Components { repeat, common } => {
                common.report("components", |exact| components(exact, repeat.repeat))
            }
            Experiment::Heads { methods, common } => {
                check(methods)?;
                common.report("heads", |exact| heads(exact, methods))
            }
        }
    }
}

/// The rows' destination and the lines printed around them.
struct Report<'c> {
    common: &'c Common,
    description: String,
    machine: String,
    origin: Provenance,
}

impl Common {
    /// Runs an experiment on each layer.
    fn layers<R>(
        &self,
        mut experiment: impl FnMut(&Exact) -> s2o_eval::Result<Vec<R>>,
    ) -> Result<(Vec<R>, Report<'_>)> {
        self.out.as_deref().map_or(Ok(()), writable::directory)?;
        let Source { layers, count, description, device } = self.source.open(|_| Ok(()))?;
        let phase = progress::start("measuring", count, "layers");
        let mut rows = Vec::new();
        for layer in layers {
            rows.extend(experiment(&Exact::new(&layer?)?)?);
            phase.add(1);
        }
        phase.finish();
        ensure!(!rows.is_empty(), "expected at least one method, got none");
        let origin = record::here(&description, &device);
        Ok((rows, Report { common: self, description, machine: machine::describe(&device), origin }))
    }

    /// Runs an experiment on each layer, writes its rows and prints them.
    fn report<R: Serialize>(
        &self,
        name: &str,
        experiment: impl FnMut(&Exact) -> s2o_eval::Result<Vec<R>>,
    ) -> Result<()> {
        let (rows, report) = self.layers(experiment)?;
        report.rows(name, &rows)
    }
}

impl Report<'_> {
    /// Writes rows without printing them.
    fn keep<R: Serialize>(&self, name: &str, rows: &[R]) -> Result<()> {
        if let Some(directory) = &self.common.out {
            record::append(directory, name, rows, &self.origin)?;
        }
        Ok(())
    }

    /// Writes rows and prints them.
    fn rows<R: Serialize>(&self, name: &str, rows: &[R]) -> Result<()> {
        self.keep(name, rows)?;
        if self.common.json {
            return exit::print(&record::json_lines(rows)?);
        }
        let look = Look::of_stdout();
        let table = record::table(rows, look)?;
        exit::print(&format!("{}{}\n\n{table}\n\n{}\n", look.gap(), self.description, self.machine))
    }
}
