//! The table of methods.

use std::path::PathBuf;

use candle_s2o::{Dense, LayerSettings, S2o, S2oConfig, SegmentLen};
use s2o_baselines::{BlockSelector, BlockSparse, SlidingWindow};

use super::{Method, Options};
use crate::error::{EvalError, Result};

/// A method that can be named.
#[derive(Debug)]
pub struct MethodRow {
    /// As in `--methods`.
    pub name: &'static str,
    /// One line.
    pub summary: &'static str,
    /// What trades error for density.
    pub knob: Option<Knob>,
    make: fn(&mut Options) -> Result<Box<dyn Method>>,
}

/// The option that trades error for density.
#[derive(Debug, Clone, Copy)]
pub struct Knob {
    /// Its name.
    pub option: &'static str,
    /// Values from dense to sparse, the published one among them.
    pub sweep: &'static [f64],
}

impl MethodRow {
    pub(super) fn make(&self, options: &mut Options) -> Result<Box<dyn Method>> {
        (self.make)(options)
    }
}

/// All methods.
pub static ALL: &[MethodRow] = &[
    MethodRow { name: "dense", summary: "exact attention", knob: None, make: |_| Ok(Box::new(Dense)) },
    MethodRow {
        name: "s2o",
        summary: "S2O, default settings",
        knob: Some(Knob { option: "tau", sweep: &[0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2] }),
        make: |options| s2o(S2oConfig::default(), options),
    },
    MethodRow {
        name: "s2o-paper",
        summary: "S2O, the paper's settings: mean query, mean ratio, tau 0.005, S 2048, queries permuted, no dense tail",
        knob: Some(Knob { option: "tau", sweep: &[0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05] }),
        make: |options| s2o(S2oConfig::paper(), options),
    },
    MethodRow {
        name: "sliding-window",
        summary: "the last 2048 keys and the first 64",
        knob: Some(Knob { option: "window", sweep: &[16384.0, 8192.0, 4096.0, 2048.0, 1024.0, 512.0, 256.0] }),
        make: |options| {
            let window = options.count("window")?.unwrap_or(2048);
            let sink = options.count("sink")?.unwrap_or(64);
            blocks(SlidingWindow::new(window, sink), options)
        },
    },
];

/// The method of this name.
///
/// # Errors
/// [`EvalError::UnknownMethod`] names those that exist.
pub fn find(name: &str) -> Result<&'static MethodRow> {
    ALL.iter().find(|row| row.name == name).ok_or_else(|| {
        let expected = ALL.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
        EvalError::UnknownMethod { expected, got: name.to_owned() }
    })
}

/// A selector with the executor, its refusal in the method's name.
fn blocks<S: BlockSelector + 'static>(
    selector: std::result::Result<S, s2o_baselines::BaselineError>,
    options: &mut Options,
) -> Result<Box<dyn Method>> {
    let selector = selector.map_err(|error| options.refuse(&error))?;
    let dense_below = options.count("dense-below")?.unwrap_or(0);
    Ok(Box::new(BlockSparse::new(selector).dense_below(dense_below)))
}

fn s2o(preset: S2oConfig, options: &mut Options) -> Result<Box<dyn Method>> {
    let mut builder = preset.to_builder();
    let tau = options.take("tau", "a number")?;
    if let Some(tau) = tau {
        builder = builder.tau(tau);
    }
    if let Some(segment) = options.count("segment")? {
        builder = builder.segment_len(SegmentLen::Fixed(segment));
    }
    if let Some(tail) = options.count("dense-tail")? {
        builder = builder.dense_tail(tail);
    }
    if let Some(sink) = options.count("front-sink")? {
        builder = builder.front_sink(sink);
    }
    if let Some(q_perm) = options.take("q-perm", "true or false")? {
        builder = builder.q_perm(q_perm);
    }
    if let Some(tokens) = options.count("dense-below")? {
        builder = builder.dense_below(tokens);
    }
    let config = builder.build().map_err(|error| options.refuse(&error))?;
    let layers: Option<PathBuf> = options.take("layers", "a file of settings by layer")?;
    let s2o = match layers {
        Some(_) if tau.is_some() => return Err(options.refuse(&"tau: expected none beside layers, which sets it")),
        Some(file) => LayerSettings::load(file).and_then(|settings| S2o::with_layers(config, &settings)),
        None => Ok(S2o::new(config)),
    };
    Ok(Box::new(s2o.map_err(|error| options.refuse(&error))?.with_stats()))
}
