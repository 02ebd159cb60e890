//! [`S2oConfig`]: every choice that the algorithm leaves open, checked once when it is built.

use std::fmt;

use thiserror::Error;

/// How the gain of a key tile and the mass before it are compared across a change of the running maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GainFrame {
    /// `gain = sum exp(s - m')`, `mass = l * exp(m - m')` with `m'` the maximum after the tile. The default.
    #[default]
    NewMax,
    /// Algorithm 3 to the letter: `gain = l' - l`, `mass = l`, although `l` and `l'` belong to different maxima.
    Literal,
}

/// How the per-row comparison `gain < tau * mass` becomes one decision for a query tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StopRule {
    /// Stop when every row is below the threshold. The default.
    #[default]
    AllRows,
    /// Stop when the mean over rows of `gain / mass` is below `tau`.
    MeanRatio,
    /// Stop when `sum gain < tau * sum mass`, both sums over the rows.
    SumRatio,
}

/// What happens to the key tile whose gain was below the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TriggeringTile {
    /// Its contribution is kept: it is already computed. The default.
    #[default]
    Keep,
    /// Its contribution is dropped (Algorithm 3 as printed).
    Discard,
}

/// Score by which the keys before a segment are ordered (Algorithm 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KeyScore {
    /// `softmax_scale * <q_mean, k>`, the paper's score.
    MeanQuery,
    /// `softmax_scale * <q_mean, k> + c * softmax_scale^2 * sum_d var_d(q) k_d^2`: with `c = 1/2` the Gaussian
    /// estimate of `log mean_q exp(softmax_scale * <q, k>)`.
    SecondCumulant {
        /// Weight of the variance term.
        c: f32,
    },
}

impl Default for KeyScore {
    fn default() -> Self {
        Self::SecondCumulant { c: 0.35 }
    }
}

/// Number of tokens in a segment (the paper's S), all of whose queries share one key order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SegmentLen {
    /// By prompt length: 256 up to 4K tokens, 512 up to 16K, 1024 up to 48K, 2048 up to 192K, 4096 beyond.
    #[default]
    Auto,
    /// The same for every prompt.
    Fixed(usize),
}

impl SegmentLen {
    /// Segment length in tokens for a prompt of `prompt_len` tokens.
    pub fn resolve(self, prompt_len: usize) -> usize {
        const K: usize = 1024;
        match self {
            Self::Fixed(len) => len,
            Self::Auto if prompt_len <= 4 * K => 256,
            Self::Auto if prompt_len <= 16 * K => 512,
            Self::Auto if prompt_len <= 48 * K => 1024,
            Self::Auto if prompt_len <= 192 * K => 2048,
            Self::Auto => 4096,
        }
    }
}

impl fmt::Display for SegmentLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(len) => len.fmt(f),
        }
    }
}

/// Prompts that are too short for S2O to pay, and take the dense path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DenseBelow {
    /// Below the measured break-even of the backend: [`S2oConfig::CPU_BREAK_EVEN`] on the CPU, another on GPUs.
    #[default]
    Auto,
    /// Below this many tokens on every backend.
    Tokens(usize),
}

impl DenseBelow {
    /// The bound in tokens, for a backend with this break-even.
    pub fn resolve(self, break_even: usize) -> usize {
        match self {
            Self::Auto => break_even,
            Self::Tokens(tokens) => tokens,
        }
    }
}

impl From<usize> for DenseBelow {
    fn from(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }
}

/// Why an [`S2oConfig`] was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// `tau` is the share of the mass so far: it must be in `[0, 1)`, and 0 never stops.
    #[error("tau: expected a number in [0, 1), got {got}")]
    Tau {
        /// The refused value.
        got: f32,
    },
    /// Tiles must hold at least one row or key, and at most 1024.
    #[error("{name}: expected 1 to 1024, got {got}")]
    Tile {
        /// `tile_q` or `tile_k`.
        name: &'static str,
        /// The refused value.
        got: usize,
    },
    /// A segment must be cut into whole tiles.
    #[error("segment_len: expected a positive multiple of {name} = {tile}, got {got}")]
    SegmentNotMultipleOfTile {
        /// `tile_q` or `tile_k`.
        name: &'static str,
        /// Size of that tile.
        tile: usize,
        /// The refused segment length.
        got: usize,
    },
    /// The weight of the variance term must be finite and not negative.
    #[error("second cumulant weight c: expected a finite number >= 0, got {got}")]
    SecondCumulant {
        /// The refused value.
        got: f32,
    },
}

/// The S2O options, checked. Build one with [`S2oConfig::builder`], or start from [`S2oConfig::default`] or
/// [`S2oConfig::paper`] and change it through [`S2oConfig::to_builder`].
///
/// ```
/// use s2o_core::{S2oConfig, SegmentLen};
/// let config = S2oConfig::builder().tau(0.05).segment_len(SegmentLen::Fixed(1024)).build()?;
/// assert_eq!(config.tau(), 0.05);
/// # Ok::<(), s2o_core::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct S2oConfig {
    segment_len: SegmentLen,
    tile_q: usize,
    tile_k: usize,
    tau: f32,
    stop_rule: StopRule,
    gain_frame: GainFrame,
    triggering_tile: TriggeringTile,
    key_score: KeyScore,
    front_sink: usize,
    dense_tail: usize,
    q_perm: bool,
    dense_below: DenseBelow,
    workspace_cap: usize,
}

impl Default for S2oConfig {
    /// The settings that keep dense attention's answers where the paper's lose them (docs/results.md).
    fn default() -> Self {
        Self {
            segment_len: SegmentLen::Auto,
            tile_q: 128,
            tile_k: 128,
            tau: 0.02,
            stop_rule: StopRule::AllRows,
            gain_frame: GainFrame::NewMax,
            triggering_tile: TriggeringTile::Keep,
            key_score: KeyScore::default(),
            front_sink: 4,
            dense_tail: 128,
            q_perm: false,
            dense_below: DenseBelow::Auto,
            workspace_cap: Self::WORKSPACE_CAP,
        }
    }
}

impl S2oConfig {
    /// Prompt length in tokens from which S2O pays on the CPU, measured (docs/results.md).
    pub const CPU_BREAK_EVEN: usize = 2048;
    /// Default of [`S2oConfig::workspace_cap`]: 256 MiB.
    pub const WORKSPACE_CAP: usize = 256 << 20;

    /// The paper's settings: mean-query score, mean ratio rule, tau 0.005, S 2048, query permutation, the triggering
    /// tile dropped, no front sink, no dense tail.
    pub fn paper() -> Self {
        Self {
            segment_len: SegmentLen::Fixed(2048),
            tau: 0.005,
            stop_rule: StopRule::MeanRatio,
            triggering_tile: TriggeringTile::Discard,
            key_score: KeyScore::MeanQuery,
            front_sink: 0,
            dense_tail: 0,
            q_perm: true,
            ..Self::default()
        }
    }

    /// Prompts that take the dense path.
    pub fn dense_below(&self) -> DenseBelow {
        self.dense_below
    }

    /// A builder that starts from [`S2oConfig::default`].
    pub fn builder() -> S2oConfigBuilder {
        Self::default().to_builder()
    }

    /// A builder that starts from this configuration.
    pub fn to_builder(&self) -> S2oConfigBuilder {
        S2oConfigBuilder { config: self.clone() }
    }

    fn check(&self) -> Result<(), ConfigError> {
        // The negated form also refuses NaN.
        if !(0.0..1.0).contains(&self.tau) {
            return Err(ConfigError::Tau { got: self.tau });
        }
        for (name, tile) in [("tile_q", self.tile_q), ("tile_k", self.tile_k)] {
            if !(1..=1024).contains(&tile) {
                return Err(ConfigError::Tile { name, got: tile });
            }
            // The segment lengths of `Auto` are multiples of 256: checking the smallest covers them all.
            let got = self.segment_len.resolve(0);
            if got == 0 || !got.is_multiple_of(tile) {
                return Err(ConfigError::SegmentNotMultipleOfTile { name, tile, got });
            }
        }
        match self.key_score {
            KeyScore::SecondCumulant { c } if !(c.is_finite() && c >= 0.0) => {
                Err(ConfigError::SecondCumulant { got: c })
            }
            _ => Ok(()),
        }
    }
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {
        impl S2oConfig {
            $($(#[$doc])* pub fn $name(&self) -> $type { self.$name })*
        }

        /// Collects options; [`S2oConfigBuilder::build`] checks them.
        #[derive(Debug, Clone)]
        #[must_use = "a builder does nothing until it is built"]
        pub struct S2oConfigBuilder {
            config: S2oConfig,
        }

        impl S2oConfigBuilder {
            $($(#[$doc])* pub fn $name(mut self, $name: $type) -> Self { self.config.$name = $name; self })*

            /// Checks the options together.
            ///
            /// # Errors
            /// The first [`ConfigError`] found.
            pub fn build(self) -> Result<S2oConfig, ConfigError> {
                self.config.check()?;
                Ok(self.config)
            }
        }
    };
}

impl S2oConfigBuilder {
    /// Prompts that take the dense path: a number of tokens, or [`DenseBelow::Auto`].
    pub fn dense_below(mut self, dense_below: impl Into<DenseBelow>) -> Self {
        self.config.dense_below = dense_below.into();
        self
    }
}

options! {
    /// Segment length S: queries of one segment share one key order, and see their own segment densely.
    segment_len: SegmentLen,
    /// Queries in a tile (B_M): the unit that stops as one.
    tile_q: usize,
    /// Keys in a tile (B_N): the unit between two decisions.
    tile_k: usize,
    /// Threshold on the gain of a key tile relative to the mass so far, in `[0, 1)`; 0 never stops.
    tau: f32,
    /// How rows decide for their tile.
    stop_rule: StopRule,
    /// How gain and mass are compared across maxima.
    gain_frame: GainFrame,
    /// Whether the tile that triggers the stop contributes.
    triggering_tile: TriggeringTile,
    /// Score that orders the keys.
    key_score: KeyScore,
    /// Tokens `0..front_sink` come first in every key order, whatever their score.
    front_sink: usize,
    /// The last `dense_tail` queries of the prompt see every key; they form query tiles of their own.
    dense_tail: usize,
    /// Whether the queries of a segment are permuted too (Algorithm 2 and 3 instead of Algorithm 4).
    q_perm: bool,
    /// Most bytes that key orders may take at a time. Segments are ranked in groups that fit, and a cap too small for
    /// one is an error: on the CPU one segment of one head needs `20 * prefix_len` bytes, on a GPU one segment of all
    /// heads and sequences `6.125 * batch * num_heads * prefix_len`.
    workspace_cap: usize,
}
