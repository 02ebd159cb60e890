//! The types of the options. [`FromStr`] parses the text that [`Display`](fmt::Display) writes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{S2oConfig, Tau};

/// A text that is not a valid value of an option.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected {expected}, got {got:?}")]
pub struct ValueError {
    /// Description of the accepted values.
    pub expected: &'static str,
    /// The refused text.
    pub got: String,
}

impl ValueError {
    pub(super) fn new(expected: &'static str, got: &str) -> Self {
        Self { expected, got: got.to_owned() }
    }
}

/// Implements [`FromStr`] and `Display` for an enum without fields.
macro_rules! spellings {
    ($type:ident: $first:literal => $first_variant:ident $(, $word:literal => $variant:ident)*) => {
        impl $type {
            pub(super) const EXPECTED: &str = concat!("`", $first, "`" $(, " or `", $word, "`")*);
        }

        impl FromStr for $type {
            type Err = ValueError;

            fn from_str(text: &str) -> Result<Self, ValueError> {
                match text {
                    $first => Ok(Self::$first_variant),
                    $($word => Ok(Self::$variant),)*
                    _ => Err(ValueError::new(Self::EXPECTED, text)),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    Self::$first_variant => $first,
                    $(Self::$variant => $word,)*
                })
            }
        }
    };
}

/// A complete set of options to start from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preset {
    /// [`S2oConfig::default`]: `default`.
    #[default]
    Default,
    /// [`S2oConfig::paper`]: `paper`.
    Paper,
}

spellings!(Preset: "default" => Default, "paper" => Paper);

impl Preset {
    /// The options of the preset.
    pub fn config(self) -> S2oConfig {
        match self {
            Self::Default => S2oConfig::default(),
            Self::Paper => S2oConfig::paper(),
        }
    }
}

/// Frame in which the gain of a key tile and the mass before it are compared when the running maximum changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GainFrame {
    /// `new-max`, the default: `gain = sum exp(s - m')`, `mass = l * exp(m - m')` with `m'` the maximum after the
    /// tile.
    NewMax,
    /// `literal`, Algorithm 3 as printed: `gain = l' - l`, `mass = l`, although `l` and `l'` belong to different
    /// maxima.
    Literal,
}

spellings!(GainFrame: "new-max" => NewMax, "literal" => Literal);

/// Rule that combines the per-row comparisons `gain < tau * mass` into one decision for a query tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopRule {
    /// `auto`, the default: without probes `all`, with probes `mean-weight` for prompts of up to 96K tokens and `max-weight`
    /// for longer ones. Probes correct the mean of what a row skips; what they leave is the part of single keys.
    Auto,
    /// `all`: stop when every row is below the threshold.
    AllRows,
    /// `mean`: stop when the mean over rows of `gain / mass` is below `tau`.
    MeanRatio,
    /// `sum`: stop when `sum gain < tau * sum mass`, both sums over the rows.
    SumRatio,
    /// `max-weight`: stop when no key of the tile has [`StopRule::WEIGHT_SHARE`] of `tau` or more of the mass before
    /// the tile, in any row. Rows whose mass is spread over many keys stop early.
    MaxWeight,
    /// `mean-weight`: the largest weight of a key in any row, relative to the mass before its tile, is averaged over the
    /// tiles so far, the last ones most ([`StopRule::RECENCY`]). Stop when this mean times the share of the prefix that is
    /// left is below `tau`. It goes on where heavy keys are rare and anywhere in the order.
    MeanWeight,
}

impl StopRule {
    /// The share of `tau` that a single key may reach under [`StopRule::MaxWeight`]: with it the rules are about
    /// equally exact at equal `tau` if there are probes (docs/algorithm.md).
    pub const WEIGHT_SHARE: f64 = 1.0 / 3.0;
    /// Tile `j` enters the mean of [`StopRule::MeanWeight`] with the factor `min(1, RECENCY / j)`. A tile's part of the mean
    /// grows as the fourth power of its number.
    pub const RECENCY: f64 = 5.0;

    /// The rule for a prompt of `prompt_len` tokens with or without probes.
    pub fn resolve(self, has_probes: bool, prompt_len: usize) -> Self {
        match self {
            Self::Auto if !has_probes => Self::AllRows,
            Self::Auto if prompt_len <= Tau::LONG_PROMPT => Self::MeanWeight,
            Self::Auto => Self::MaxWeight,
            rule => rule,
        }
    }
}

spellings!(
    StopRule: "auto" => Auto, "all" => AllRows, "mean" => MeanRatio, "sum" => SumRatio, "max-weight" => MaxWeight,
    "mean-weight" => MeanWeight
);

/// Treatment of the key tile whose gain was below the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TriggeringTile {
    /// `keep`, the default: its contribution counts, because it is already computed.
    Keep,
    /// `discard`: its contribution is dropped (Algorithm 3 as printed).
    Discard,
}

spellings!(TriggeringTile: "keep" => Keep, "discard" => Discard);

/// Score that orders the keys before a segment (Algorithm 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KeyScore {
    /// `mean`: `softmax_scale * <q_mean, k>`, the paper's score.
    MeanQuery,
    /// `second-cumulant=C`, or `second-cumulant` with the default weight:
    /// `softmax_scale * <q_mean, k> + c * softmax_scale^2 * sum_d var_d(q) k_d^2`. With `c = 1/2` it is the Gaussian
    /// estimate of `log mean_q exp(softmax_scale * <q, k>)`.
    SecondCumulant {
        /// Weight of the variance term.
        c: f32,
    },
}

impl KeyScore {
    pub(super) const EXPECTED: &str = "`mean`, `second-cumulant` or `second-cumulant=C` with a number C";
}

impl Default for KeyScore {
    fn default() -> Self {
        Self::SecondCumulant { c: 0.35 }
    }
}

impl FromStr for KeyScore {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let error = || ValueError::new(Self::EXPECTED, text);
        match text.split_once('=') {
            None if text == "mean" => Ok(Self::MeanQuery),
            None if text == "second-cumulant" => Ok(Self::default()),
            Some(("second-cumulant", c)) => Ok(Self::SecondCumulant { c: c.parse().map_err(|_| error())? }),
            _ => Err(error()),
        }
    }
}

impl fmt::Display for KeyScore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MeanQuery => f.write_str("mean"),
            Self::SecondCumulant { c } => write!(f, "second-cumulant={c}"),
        }
    }
}

/// Reads a Boolean option.
pub(super) fn read_switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

pub(super) fn switch(on: bool) -> String {
    if on { "on" } else { "off" }.to_owned()
}

pub(super) const BOUND: &str = "`off` or a finite number above 0";

pub(super) fn is_bound(bound: &f32) -> bool {
    bound.is_finite() && *bound > 0.0
}

/// Reads an optional bound.
pub(super) fn read_bound(text: &str) -> Option<Option<f32>> {
    match text {
        "off" => Some(None),
        _ => text.parse().ok().filter(is_bound).map(Some),
    }
}

pub(super) fn bound(bound: Option<f32>) -> String {
    bound.map_or_else(|| "off".to_owned(), |bound| bound.to_string())
}

const MEBIBYTE: f64 = (1 << 20) as f64;

/// Reads a number of bytes, written in MiB.
pub(super) fn read_mebibytes(text: &str) -> Option<usize> {
    let mebibytes: f64 = text.parse().ok()?;
    (mebibytes >= 0.0).then_some((mebibytes * MEBIBYTE) as usize)
}

pub(crate) fn mebibytes(bytes: usize) -> String {
    (bytes as f64 / MEBIBYTE).to_string()
}

/// MiB of which `bytes` need at most that many, in thousandths.
pub(crate) fn enough_mebibytes(bytes: usize) -> String {
    ((bytes as f64 / MEBIBYTE * 1000.0).ceil() / 1000.0).to_string()
}
