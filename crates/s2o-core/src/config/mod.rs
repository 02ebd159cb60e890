//! [`S2oConfig`]: the options that the algorithm leaves open, checked once when the configuration is built.

mod auto;
mod options;
mod values;

pub use auto::{DenseBelow, DenseTail, ProbeStride, SegmentLen, Tau};
pub use options::{ConfigOption, S2oConfigBuilder};
pub use values::{GainFrame, KeyScore, Preset, StopRule, TriggeringTile, ValueError};
pub(crate) use values::{enough_mebibytes, mebibytes};

use thiserror::Error;

/// The reason an [`S2oConfig`] was refused. The messages name options as [`S2oConfig::OPTIONS`] does: in command lines
/// and environment variables they have these names too.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the options")]
pub enum ConfigError {
    /// No option has this name.
    #[error("option: expected one of {}, got {got:?}", names())]
    Name { got: String },
    /// The text is not a valid value of the option.
    #[error("{name}: {reason}")]
    Value { name: &'static str, reason: ValueError },
    /// `tau` is a share of the softmax mass so far, so it must be in `[0, 1)`. 0 never stops.
    #[error("tau: expected a number in [0, 1), got {got}")]
    Tau { got: f32 },
    /// A tile must hold 1 to 1024 queries or keys.
    #[error("{name}: expected 1 to 1024, got {got}")]
    Tile { name: &'static str, got: usize },
    /// The segment length must be a multiple of the tile size.
    #[error("segment: expected a positive multiple of {name} = {tile}, got {got}")]
    SegmentNotMultipleOfTile { name: &'static str, tile: usize, got: usize },
    /// The weight of the variance term must be finite and not negative.
    #[error("score: second-cumulant=c: expected a finite number >= 0, got {got}")]
    SecondCumulant { got: f32 },
    /// A stride is a distance.
    #[error("probe-stride: expected a positive number of tokens, got 0; `off` turns probes off")]
    ProbeStride,
    /// An error is a positive number; `off` in text, `None` in code, sets no bound.
    #[error("max-error: expected a finite number above 0, got {got}")]
    MaxError { got: f32 },
}

/// The checked S2O options. Build a configuration with [`S2oConfig::builder`], or start from [`S2oConfig::default`] or
/// [`S2oConfig::paper`] and change it with [`S2oConfig::to_builder`].
///
/// ```
/// use s2o_core::{S2oConfig, SegmentLen, Tau};
/// let config = S2oConfig::builder().tau(0.05).segment_len(SegmentLen::Fixed(1024)).build()?;
/// assert_eq!(config.tau(), Tau::Fixed(0.05));
/// # Ok::<(), s2o_core::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct S2oConfig {
    segment_len: SegmentLen,
    tile_q: usize,
    tile_k: usize,
    tau: Tau,
    stop_rule: StopRule,
    gain_frame: GainFrame,
    triggering_tile: TriggeringTile,
    key_score: KeyScore,
    front_sink: usize,
    recent: usize,
    dense_tail: DenseTail,
    q_perm: bool,
    probe_stride: ProbeStride,
    max_error: Option<f32>,
    dense_below: DenseBelow,
    workspace_cap: usize,
}

impl Default for S2oConfig {
    /// Settings that keep the answers of dense attention where the paper's settings lose them
    /// (docs/results-answers.md).
    fn default() -> Self {
        Self {
            segment_len: SegmentLen::Auto,
            tile_q: 128,
            tile_k: 128,
            tau: Tau::Auto,
            stop_rule: StopRule::Auto,
            gain_frame: GainFrame::NewMax,
            triggering_tile: TriggeringTile::Keep,
            key_score: KeyScore::default(),
            front_sink: 4,
            recent: 60,
            dense_tail: DenseTail::Auto,
            q_perm: false,
            probe_stride: ProbeStride::Auto,
            max_error: None,
            dense_below: DenseBelow::Auto,
            workspace_cap: 1 << 30,
        }
    }
}

impl S2oConfig {
    /// Measured prompt length in tokens from which S2O is faster than dense attention on the CPU (docs/results-cpu.md).
    pub const CPU_BREAK_EVEN: usize = 2048;

    /// The paper's settings: mean-query score, mean ratio rule, tau 0.005, S 2048, query permutation, the triggering
    /// tile dropped, no front sink, no recent keys, no dense tail, no probes.
    pub fn paper() -> Self {
        Self {
            segment_len: SegmentLen::Fixed(2048),
            tau: Tau::Fixed(0.005),
            stop_rule: StopRule::MeanRatio,
            triggering_tile: TriggeringTile::Discard,
            key_score: KeyScore::MeanQuery,
            front_sink: 0,
            recent: 0,
            dense_tail: DenseTail::Tokens(0),
            q_perm: true,
            probe_stride: ProbeStride::Off,
            max_error: None,
            ..Self::default()
        }
    }

    /// A builder that starts from [`S2oConfig::default`].
    pub fn builder() -> S2oConfigBuilder {
        Self::default().to_builder()
    }

    /// A builder that starts from this configuration.
    pub fn to_builder(&self) -> S2oConfigBuilder {
        S2oConfigBuilder { config: self.clone() }
    }

    /// Whether key `t` of a prefix comes first in its order, regardless of its score.
    pub(crate) fn leads(&self, t: usize, prefix_len: usize) -> bool {
        t < self.front_sink || prefix_len - t <= self.recent
    }

    fn check(&self) -> Result<(), ConfigError> {
        // The negated form also refuses NaN.
        match self.tau {
            Tau::Fixed(got) if !(0.0..1.0).contains(&got) => return Err(ConfigError::Tau { got }),
            _ => {}
        }
        for (name, tile) in [("tile-q", self.tile_q), ("tile-k", self.tile_k)] {
            if !(1..=1024).contains(&tile) {
                return Err(ConfigError::Tile { name, got: tile });
            }
            // The segment lengths of `Auto` are multiples of 256, so checking the smallest covers them all.
            let got = self.segment_len.resolve(0);
            if got == 0 || !got.is_multiple_of(tile) {
                return Err(ConfigError::SegmentNotMultipleOfTile { name, tile, got });
            }
        }
        if self.probe_stride == ProbeStride::Every(0) {
            return Err(ConfigError::ProbeStride);
        }
        if let Some(got) = self.max_error.filter(|bound| !values::is_bound(bound)) {
            return Err(ConfigError::MaxError { got });
        }
        match self.key_score {
            KeyScore::SecondCumulant { c } if !(c.is_finite() && c >= 0.0) => {
                Err(ConfigError::SecondCumulant { got: c })
            }
            _ => Ok(()),
        }
    }
}

/// The names of all options, separated by commas.
fn names() -> String {
    S2oConfig::OPTIONS.iter().map(ConfigOption::name).collect::<Vec<_>>().join(", ")
}
