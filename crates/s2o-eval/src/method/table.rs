//! The table of methods.

use std::path::PathBuf;
use std::str::FromStr;

use candle_s2o::{ConfigOption, Dense, LayerSettings, Preset, S2o, S2oConfig};
use s2o_baselines::{
    BaselineError, BlockSelector, BlockSparse, FlashPrefill, FlexPrefill, HeadPattern, MInference, MInferenceConfig,
    MeanPooling, Pbs, PbsScore, SlidingWindow, Sparge, SpargeConfig, XAttention,
};

use super::Method;
use crate::error::{EvalError, Result};

/// A row of the table.
#[derive(Debug)]
pub struct MethodRow {
    /// The name, as in `--methods`.
    pub name: &'static str,
    /// A description on one line.
    pub summary: &'static str,
    /// The option that trades error for density.
    pub knob: Option<Knob>,
    pub(super) make: fn(&mut Options) -> Result<Box<dyn Method>>,
}

/// The option that trades error for density.
#[derive(Debug, Clone, Copy)]
pub struct Knob {
    /// Its name.
    pub option: &'static str,
    /// Values from dense to sparse, including the published value.
    pub sweep: &'static [f64],
    /// The option for a file that sets the knob by layer or head, if the method has one. Then nothing is swept.
    pub file: Option<&'static str>,
}

impl MethodRow {
    /// Names of the method's options.
    pub fn options(&self) -> Vec<&'static str> {
        let mut options = Options { method: self.name, given: &[], known: Vec::new() };
        // The constructor reads every option. Its result does not matter here.
        let _ = (self.make)(&mut options);
        options.known
    }
}

/// Options by name. A method reads the options that it supports; [`MethodSpec::build`](super::MethodSpec::build)
/// refuses the rest.
#[derive(Debug)]
pub(super) struct Options<'s> {
    pub(super) method: &'s str,
    pub(super) given: &'s [(String, String)],
    /// The options that the method has read.
    pub(super) known: Vec<&'static str>,
}

impl<'s> Options<'s> {
    /// The text of an option, if it is given.
    pub(super) fn text(&mut self, name: &'static str) -> Option<&'s str> {
        if !self.known.contains(&name) {
            self.known.push(name);
        }
        self.given.iter().rev().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// The value of an option, if it is given. `expected` describes the valid values.
    pub(super) fn take<T: FromStr>(&mut self, name: &'static str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| self.refuse(&format!("{name}: expected {expected}, got {value}")))
    }

    pub(super) fn number(&mut self, name: &'static str) -> Result<Option<f64>> {
        self.take(name, "a number")
    }

    pub(super) fn count(&mut self, name: &'static str) -> Result<Option<usize>> {
        self.take(name, "a whole number")
    }

    /// The error for an option value that the method refuses.
    pub(super) fn refuse(&self, reason: &impl ToString) -> EvalError {
        EvalError::MethodOption { method: self.method.to_owned(), reason: reason.to_string() }
    }
}

/// All methods.
pub static ALL: &[MethodRow] = &[
    MethodRow { name: DENSE, summary: "exact attention", knob: None, make: |_| Ok(Box::new(Dense)) },
    MethodRow {
        name: "s2o",
        summary: "S2O, default settings",
        knob: Some(Knob {
            option: "tau",
            sweep: &[0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2],
            file: Some("layers"),
        }),
        make: |options| s2o(Preset::Default, options),
    },
    MethodRow {
        name: "s2o-paper",
        summary: "S2O, paper's settings: mean query, mean ratio, tau 0.005, S 2048, queries permuted, no dense tail",
        knob: Some(Knob {
            option: "tau",
            sweep: &[0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05],
            file: Some("layers"),
        }),
        make: |options| s2o(Preset::Paper, options),
    },
    MethodRow {
        name: "mean-pooling",
        summary: "blocks in the order of the products of their means, until they hold 0.9 of the mass",
        knob: Some(THRESHOLD),
        make: |options| {
            let threshold = options.number("threshold")?.unwrap_or(0.9);
            blocks(MeanPooling::default().threshold(threshold), options)
        },
    },
    MethodRow {
        name: "pbs",
        summary: "PBS-Attn: keys permuted in segments of 256, then blocks chosen by their means",
        knob: Some(THRESHOLD),
        make: |options| pbs(PbsScore::MeanPooled, options),
    },
    MethodRow {
        name: "pbs-antidiagonal",
        summary: "PBS-Attn with XAttention's scores",
        knob: Some(THRESHOLD),
        make: |options| pbs(PbsScore::Antidiagonal, options),
    },
    MethodRow {
        name: "xattention",
        summary: "XAttention: blocks in the order of their antidiagonals, stride 16, until they hold 0.9 of the mass",
        knob: Some(THRESHOLD),
        make: |options| {
            let stride = options.count("stride")?.unwrap_or(16);
            let threshold = options.number("threshold")?.unwrap_or(0.9);
            blocks(XAttention::default().stride(stride).and_then(|method| method.threshold(threshold)), options)
        },
    },
    MethodRow {
        name: "flexprefill",
        summary: "FlexPrefill: pooled blocks or verticals and slashes, by a head's last queries; gamma 0.9, tau 0.1",
        knob: Some(Knob { option: "gamma", ..THRESHOLD }),
        make: |options| {
            let gamma = options.number("gamma")?.unwrap_or(0.9);
            let tau = options.number("tau")?.unwrap_or(0.1);
            let budget = options.count("min-budget")?.unwrap_or(1024);
            let method = FlexPrefill::default().min_budget(budget).gamma(gamma);
            blocks(method.and_then(|method| method.tau(tau)), options)
        },
    },
    MethodRow {
        name: "flashprefill",
        summary: "FlashPrefill: blocks with at least 0.12 of the greatest score of their row",
        knob: Some(Knob {
            option: "alpha",
            sweep: &[0.0001, 0.001, 0.003, 0.01, 0.03, 0.06, 0.12, 0.2, 0.3, 0.5, 0.8],
            file: None,
        }),
        make: |options| {
            let alpha = options.number("alpha")?.unwrap_or(0.12);
            blocks(FlashPrefill::default().alpha(alpha), options)
        },
    },
    MethodRow {
        name: "minference",
        summary: "MInference: the best published pattern of each head, searched on the first prompt or from config",
        knob: Some(Knob {
            option: "budget",
            sweep: &[2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125],
            file: Some(CONFIG),
        }),
        make: |options| {
            let budget = options.number("budget")?;
            if let Some(file) = config(options, &[("budget", budget.is_some())])? {
                let method = MInferenceConfig::load(file).and_then(MInference::from_config);
                return blocks(method.map(|method| method.search_from(0)), options);
            }
            let budget = budget.unwrap_or(1.0);
            if !(budget > 0.0 && budget.is_finite()) {
                return Err(options.refuse(&format!("budget: expected a number above 0, got {budget}")));
            }
            let candidates = HeadPattern::PUBLISHED.iter().map(|pattern| pattern.scaled(budget));
            blocks(MInference::default().search_from(0).candidates(candidates), options)
        },
    },
    MethodRow {
        name: "spargeattn",
        summary: "SpargeAttn: blocks chosen by their means, dissimilar blocks always; untuned or with config",
        knob: Some(Knob { option: "tau", file: Some(CONFIG), ..THRESHOLD }),
        make: |options| {
            let (tau, theta) = (options.number("tau")?, options.number("theta")?);
            let lambda: Option<f32> = options.take("lambda", "a number")?;
            let given = [("tau", tau.is_some()), ("theta", theta.is_some()), ("lambda", lambda.is_some())];
            if let Some(file) = config(options, &given)? {
                return blocks(SpargeConfig::load(file).and_then(Sparge::from_config), options);
            }
            let method =
                Sparge::default().tau(tau.unwrap_or(0.98)).and_then(|method| method.theta(theta.unwrap_or(0.6)));
            blocks(method.and_then(|method| method.lambda(Some(lambda.unwrap_or(-50.0)))), options)
        },
    },
    MethodRow {
        name: "sliding-window",
        summary: "the last 2048 keys and the first 64",
        knob: Some(WINDOW),
        make: |options| blocks(sliding_window(options)?, options),
    },
    MethodRow {
        name: "delta",
        summary: "Delta Attention: the sliding window, corrected by exact attention of every 64th query",
        knob: Some(WINDOW),
        make: |options| {
            let stride = options.count("stride")?.unwrap_or(64);
            let window = block_sparse(sliding_window(options)?, options)?.with_delta(stride);
            Ok(Box::new(window.map_err(|error| options.refuse(&error))?))
        },
    },
];

/// The name of exact attention, the reference for other methods.
pub const DENSE: &str = "dense";

/// The option that names a file of settings by layer and head.
const CONFIG: &str = "config";

/// Share of the estimated mass that the chosen blocks must hold.
const THRESHOLD: Knob =
    Knob { option: "threshold", sweep: &[0.999, 0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], file: None };

/// Keys that every query sees before itself.
const WINDOW: Knob =
    Knob { option: "window", sweep: &[16384.0, 8192.0, 4096.0, 2048.0, 1024.0, 512.0, 256.0], file: None };

/// The method of this name.
///
/// # Errors
/// [`EvalError::Unknown`] with the existing names.
pub fn find(name: &str) -> Result<&'static MethodRow> {
    let row = ALL.iter().find(|row| row.name == name);
    row.ok_or_else(|| EvalError::unknown("method", ALL.iter().map(|row| row.name), name))
}

/// The block-sparse executor with a selector as a method.
fn blocks<S: BlockSelector + 'static>(
    selector: std::result::Result<S, BaselineError>,
    options: &mut Options,
) -> Result<Box<dyn Method>> {
    Ok(Box::new(block_sparse(selector, options)?))
}

/// The block-sparse executor with a selector; an error of the selector names the method.
fn block_sparse<S: BlockSelector>(
    selector: std::result::Result<S, BaselineError>,
    options: &mut Options,
) -> Result<BlockSparse<S>> {
    let selector = selector.map_err(|error| options.refuse(&error))?;
    let dense_below = options.count("dense-below")?.unwrap_or(0);
    Ok(BlockSparse::new(selector).dense_below(dense_below))
}

fn sliding_window(options: &mut Options) -> Result<std::result::Result<SlidingWindow, BaselineError>> {
    let window = options.count("window")?.unwrap_or(2048);
    let sink = options.count("sink")?.unwrap_or(64);
    Ok(SlidingWindow::new(window, sink))
}

/// The file of settings by layer and head, if one is given. It excludes the options that it sets.
fn config(options: &mut Options, set_by_it: &[(&str, bool)]) -> Result<Option<PathBuf>> {
    let file = options.take(CONFIG, "a file of settings by layer and head")?;
    match set_by_it.iter().find(|(_, given)| *given) {
        Some((option, _)) if file.is_some() => {
            Err(options.refuse(&format!("{option}: expected none together with {CONFIG}, which sets it")))
        }
        _ => Ok(file),
    }
}

fn pbs(score: PbsScore, options: &mut Options) -> Result<Box<dyn Method>> {
    let segment = options.count("segment")?.unwrap_or(256);
    let threshold = options.number("threshold")?.unwrap_or(0.9);
    let shared_order = options.take("shared-order", "true or false")?.unwrap_or(false);
    let method = Pbs::default().score(score).shared_order(shared_order).segment(segment);
    blocks(method.and_then(|method| method.threshold(threshold)), options)
}

/// Option of S2O: whether it knows where a prompt in chunks ends.
const PROMPT_END: &str = "prompt-end";

fn s2o(preset: Preset, options: &mut Options) -> Result<Box<dyn Method>> {
    let mut builder = preset.config().to_builder();
    for name in S2oConfig::OPTIONS.iter().map(ConfigOption::name) {
        if let Some(text) = options.text(name) {
            builder = builder.set(name, text).map_err(|error| options.refuse(&error))?;
        }
    }
    let config = builder.build().map_err(|error| options.refuse(&error))?;
    let layers: Option<PathBuf> = options.take("layers", "a file of settings by layer")?;
    let s2o = match layers {
        Some(_) if options.text("tau").is_some() => {
            return Err(options.refuse(&"tau: expected none together with layers, which sets it"));
        }
        Some(file) => LayerSettings::load(file).and_then(|settings| S2o::with_layers(config, &settings)),
        None => Ok(S2o::new(config)),
    };
    let s2o = s2o.map_err(|error| options.refuse(&error))?.with_stats();
    let knows_end = options.take(PROMPT_END, "true or false")?.unwrap_or(true);
    Ok(Box::new(if knows_end { s2o } else { s2o.without_prompt_end() }))
}
