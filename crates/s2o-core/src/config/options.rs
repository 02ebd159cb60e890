//! The table of options: each row defines a getter, a builder method, and an option that can be set by name.

use super::auto::{DenseBelow, DenseTail, ProbeStride, SegmentLen, Tau};
use super::values::{
    BOUND, GainFrame, KeyScore, StopRule, TriggeringTile, bound, mebibytes, read_bound, read_mebibytes, read_switch,
    switch,
};
use super::{ConfigError, S2oConfig, ValueError};

/// An option of [`S2oConfig`] that can be set from text: a command line, a method spec or an environment variable.
#[derive(Debug)]
pub struct ConfigOption {
    name: &'static str,
    summary: &'static str,
    expected: &'static str,
    /// Returns `None` if the text is not a valid value of the option.
    set: fn(&mut S2oConfig, &str) -> Option<()>,
    get: fn(&S2oConfig) -> String,
}

impl ConfigOption {
    /// Name of the option, such as `stop-rule`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Description of the option, in one or two sentences.
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// Description of the accepted values.
    pub fn expected(&self) -> &'static str {
        self.expected
    }
}

/// Collects options; [`S2oConfigBuilder::build`] checks them.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct S2oConfigBuilder {
    pub(super) config: S2oConfig,
}

impl S2oConfigBuilder {
    /// Sets the option `name` of [`S2oConfig::OPTIONS`] to the value written in `text`.
    ///
    /// ```
    /// use s2o_core::{S2oConfig, StopRule};
    /// let config = S2oConfig::builder().set("stop-rule", "mean")?.set("segment", "auto")?.build()?;
    /// assert_eq!(config.stop_rule(), StopRule::MeanRatio);
    /// # Ok::<(), s2o_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Name`] if no option has this name, [`ConfigError::Value`] if `text` is not a valid value of the
    /// option. [`S2oConfigBuilder::build`] checks ranges.
    pub fn set(mut self, name: &str, text: &str) -> Result<Self, ConfigError> {
        let option = S2oConfig::OPTIONS.iter().find(|option| option.name == name);
        let option = option.ok_or_else(|| ConfigError::Name { got: name.to_owned() })?;
        (option.set)(&mut self.config, text).ok_or_else(|| ConfigError::Value {
            name: option.name,
            reason: ValueError { expected: option.expected, got: text.to_owned() },
        })?;
        Ok(self)
    }

    /// Checks the options together.
    ///
    /// # Errors
    /// The first [`ConfigError`] found.
    pub fn build(self) -> Result<S2oConfig, ConfigError> {
        self.config.check()?;
        Ok(self.config)
    }
}

impl S2oConfig {
    /// The value of the option `name` of [`S2oConfig::OPTIONS`], as text that [`S2oConfigBuilder::set`] accepts. `None`
    /// if no option has this name.
    pub fn get(&self, name: &str) -> Option<String> {
        S2oConfig::OPTIONS.iter().find(|option| option.name == name).map(|option| (option.get)(self))
    }
}

/// Reads the value of an option from text, with its type's own parser unless its row names another.
macro_rules! read {
    ($text:ident) => {
        $text.parse().ok()
    };
    ($text:ident, $read:ident) => {
        $read($text)
    };
}

/// The text that [`read!`] reads.
macro_rules! written {
    ($value:expr) => {
        $value.to_string()
    };
    ($value:expr, $written:ident) => {
        $written($value)
    };
}

macro_rules! options {
    ($(
        $(#[doc = $doc:literal])*
        $name:literal ($expected:expr) $field:ident($argument:ty) -> $type:ty $(, $read:ident, $written:ident)?;
    )*) => {
        impl S2oConfig {
            /// All options, with the names that [`S2oConfigBuilder::set`] and [`S2oConfig::get`] accept.
            pub const OPTIONS: &[ConfigOption] = &[$(ConfigOption {
                name: $name,
                summary: concat!($($doc),*).trim_ascii_start(),
                expected: $expected,
                set: |config, text| {
                    config.$field = read!(text $(, $read)?)?;
                    Some(())
                },
                get: |config| written!(config.$field $(, $written)?),
            }),*];

            $($(#[doc = $doc])* pub fn $field(&self) -> $type { self.$field })*
        }

        impl S2oConfigBuilder {
            $($(#[doc = $doc])* pub fn $field(mut self, $field: $argument) -> Self {
                self.config.$field = $field.into();
                self
            })*
        }
    };
}

options! {
    /// Threshold for the gain of a key tile relative to the softmax mass so far, in `[0, 1)`. 0 never stops. A larger
    /// value skips more. `auto` is 0.019 for prompts below 12K tokens, 0.015 to 24K, 0.0225 to 48K, 0.02 to 96K, and 0.025
    /// above. A later chunk of a prompt whose end is not known has 0.02 from 24K on.
    "tau" (Tau::EXPECTED) tau(impl Into<Tau>) -> Tau;
    /// Segment length S in tokens, a multiple of both tile sizes. The queries of one segment share one key order and
    /// see their own segment densely. `auto` is 256 to 4K tokens, 512 to 16K, 1024 to 48K, 2048 to 384K, and 4096 above.
    "segment" (SegmentLen::EXPECTED) segment_len(SegmentLen) -> SegmentLen;
    /// Number of queries at the end of the prompt that see every key. They form separate query tiles. `auto` is 128 for prompts up
    /// to 24K tokens, and 64 above.
    "dense-tail" (DenseTail::EXPECTED) dense_tail(impl Into<DenseTail>) -> DenseTail;
    /// Number of tokens at the start of the prompt that come first in every key order, regardless of their scores.
    "front-sink" ("a number of tokens") front_sink(usize) -> usize;
    /// Number of tokens right before a segment that come first in its key order, after the front sink. The first
    /// queries of a segment need them, because their own window is short.
    "recent" ("a number of tokens") recent(usize) -> usize;
    /// Whether the queries of a segment are permuted too (Algorithms 2 and 3 instead of Algorithm 4).
    "q-perm" ("`on` or `off`") q_perm(bool) -> bool, read_switch, switch;
    /// One query in so many positions is a probe: it gets exact attention, which corrects the other queries of its
    /// segment for the keys that they skipped, and measures the error. `auto` is eight in a segment of prompts of 12K tokens
    /// or more, at least 256 tokens apart above 24K, and none in shorter prompts.
    "probe-stride" (ProbeStride::EXPECTED) probe_stride(ProbeStride) -> ProbeStride;
    /// Upper bound on the relative L2 error that the probes measure (`auto` probes if they are off). Heads and segments
    /// above it are computed again with more keys, at the end with all.
    "max-error" (BOUND) max_error(impl Into<Option<f32>>) -> Option<f32>, read_bound, bound;
    /// Prompts with fewer tokens use the dense path. `auto` is the measured break-even of the device: 2048 tokens on a CPU,
    /// 8192 on a GPU, and 20,480 with a head_dim above 128 on an H100 or H200.
    "dense-below" (DenseBelow::EXPECTED) dense_below(impl Into<DenseBelow>) -> DenseBelow;
    /// Score that orders the keys. `mean` is the paper's score.
    "score" (KeyScore::EXPECTED) key_score(KeyScore) -> KeyScore;
    /// Rule that stops a query tile: the ratio of gain to mass of every row (`all`), the mean of these ratios (`mean`),
    /// the ratio of the sums over the rows (`sum`), three times the largest weight of a key in every row (`max-weight`), or
    /// the mean over the tiles of the largest weights times the share of the prefix that is left (`mean-weight`) must be
    /// below tau. `auto` is `all` without probes, and with probes `mean-weight` to 96K tokens and `max-weight` above.
    "stop-rule" (StopRule::EXPECTED) stop_rule(StopRule) -> StopRule;
    /// Frame in which gain and mass are compared when the running maximum changes.
    "gain-frame" (GainFrame::EXPECTED) gain_frame(GainFrame) -> GainFrame;
    /// Whether the key tile that triggers the stop contributes.
    "triggering-tile" (TriggeringTile::EXPECTED) triggering_tile(TriggeringTile) -> TriggeringTile;
    /// Number of queries in a tile (B_M). All queries of a tile stop together.
    "tile-q" ("1 to 1024") tile_q(usize) -> usize;
    /// Number of keys in a tile (B_N). Each key tile is followed by a stop decision.
    "tile-k" ("1 to 1024") tile_k(usize) -> usize;
    /// Upper bound on the memory of key orders: in MiB as text, in bytes in code. Segments are ranked in groups that fit. A
    /// bound too small for one segment is an error: on the CPU a segment of one head needs `20 * prefix_len` bytes, on a GPU
    /// a segment of all heads and sequences needs `6.125 * batch * num_heads * prefix_len`.
    "workspace-mib" ("a number of MiB >= 0") workspace_cap(usize) -> usize, read_mebibytes, mebibytes;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Preset;

    fn every_value() -> Vec<S2oConfig> {
        let base = S2oConfig::builder;
        let builders = [
            base(),
            S2oConfig::paper().to_builder(),
            base().tau(0.0).segment_len(SegmentLen::Fixed(384)).dense_tail(7).front_sink(9).recent(8).dense_below(77),
            base().tile_q(64).tile_k(32).q_perm(true).workspace_cap(7679).gain_frame(GainFrame::Literal),
            base().stop_rule(StopRule::SumRatio).triggering_tile(TriggeringTile::Discard).workspace_cap(usize::MAX),
            base().probe_stride(ProbeStride::Every(96)).max_error(0.125),
            base()
                .probe_stride(ProbeStride::Auto)
                .key_score(KeyScore::SecondCumulant { c: 0.1 })
                .tau(0.3)
                .dense_below(usize::MAX),
        ];
        builders.map(|builder| builder.build().unwrap()).to_vec()
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        for config in every_value() {
            for base in [Preset::Default, Preset::Paper] {
                let read = S2oConfig::OPTIONS.iter().fold(base.config().to_builder(), |builder, option| {
                    builder.set(option.name, &config.get(option.name).unwrap()).unwrap()
                });
                assert_eq!(read.build().unwrap(), config);
            }
        }
        for preset in [Preset::Default, Preset::Paper] {
            assert_eq!(preset.to_string().parse(), Ok(preset));
        }
    }

    #[test]
    fn names_change_the_option_they_name() {
        let set = |name, text| S2oConfig::builder().set(name, text).unwrap().build().unwrap();
        let built = |change: fn(S2oConfigBuilder) -> S2oConfigBuilder| change(S2oConfig::builder()).build().unwrap();
        assert_eq!(set("tau", "0.5"), built(|b| b.tau(0.5)));
        assert_eq!(set("tau", "auto"), S2oConfig::default());
        assert_eq!(set("segment", "1024"), built(|b| b.segment_len(SegmentLen::Fixed(1024))));
        assert_eq!(set("dense-tail", "3"), built(|b| b.dense_tail(3)));
        assert_eq!(set("dense-tail", "auto"), S2oConfig::default());
        assert_eq!(set("front-sink", "3"), built(|b| b.front_sink(3)));
        assert_eq!(set("recent", "3"), built(|b| b.recent(3)));
        assert_eq!(set("q-perm", "on"), built(|b| b.q_perm(true)));
        assert_eq!(set("probe-stride", "auto"), built(|b| b.probe_stride(ProbeStride::Auto)));
        assert_eq!(set("probe-stride", "64"), built(|b| b.probe_stride(ProbeStride::Every(64))));
        assert_eq!(set("max-error", "0.1"), built(|b| b.max_error(0.1)));
        assert_eq!(set("max-error", "off"), S2oConfig::default());
        assert_eq!(set("dense-below", "3"), built(|b| b.dense_below(3)));
        assert_eq!(set("score", "mean"), built(|b| b.key_score(KeyScore::MeanQuery)));
        assert_eq!(set("score", "second-cumulant"), built(|b| b.key_score(KeyScore::default())));
        assert_eq!(set("score", "second-cumulant=2"), built(|b| b.key_score(KeyScore::SecondCumulant { c: 2.0 })));
        assert_eq!(set("stop-rule", "mean"), built(|b| b.stop_rule(StopRule::MeanRatio)));
        assert_eq!(set("stop-rule", "sum"), built(|b| b.stop_rule(StopRule::SumRatio)));
        assert_eq!(set("stop-rule", "all"), built(|b| b.stop_rule(StopRule::AllRows)));
        assert_eq!(set("stop-rule", "max-weight"), built(|b| b.stop_rule(StopRule::MaxWeight)));
        assert_eq!(set("stop-rule", "mean-weight"), built(|b| b.stop_rule(StopRule::MeanWeight)));
        assert_eq!(set("gain-frame", "literal"), built(|b| b.gain_frame(GainFrame::Literal)));
        assert_eq!(set("triggering-tile", "discard"), built(|b| b.triggering_tile(TriggeringTile::Discard)));
        assert_eq!(set("tile-q", "32"), built(|b| b.tile_q(32)));
        assert_eq!(set("tile-k", "32"), built(|b| b.tile_k(32)));
        assert_eq!(set("workspace-mib", "3"), built(|b| b.workspace_cap(3 << 20)));
        assert_eq!(S2oConfig::paper(), built(|_| Preset::Paper.config().to_builder()));
        assert_eq!(S2oConfig::default().get("colour"), None);
    }

    #[test]
    fn the_papers_settings() {
        for (name, value) in [
            ("segment", "2048"),
            ("tau", "0.005"),
            ("stop-rule", "mean"),
            ("triggering-tile", "discard"),
            ("score", "mean"),
            ("front-sink", "0"),
            ("recent", "0"),
            ("dense-tail", "0"),
            ("q-perm", "on"),
            ("probe-stride", "off"),
            ("max-error", "off"),
        ] {
            assert_eq!(S2oConfig::paper().get(name).as_deref(), Some(value), "{name}");
        }
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for got in ["colour", "", "Tau", "stop_rule"] {
            let error = S2oConfig::builder().set(got, "0.1").unwrap_err();
            assert_eq!(error, ConfigError::Name { got: got.to_owned() });
            let names: Vec<_> = S2oConfig::OPTIONS.iter().map(ConfigOption::name).collect();
            assert_eq!(error.to_string(), format!("option: expected one of {}, got {got:?}", names.join(", ")));
        }
    }

    #[test]
    fn other_values_say_what_was_expected_and_got() {
        for option in S2oConfig::OPTIONS {
            for got in ["", " ", "-1", "x", "ON", "all,mean", "second-cumulant=", "=1", "1 "] {
                if (option.name, got) == ("tau", "-1") {
                    continue;
                }
                let error = S2oConfig::builder().set(option.name, got).unwrap_err().to_string();
                assert_eq!(error, format!("{}: expected {}, got {got:?}", option.name(), option.expected()));
            }
            assert!(option.summary().ends_with('.') && option.summary().contains(' '), "{}", option.name());
        }
        let refused = |name, text| S2oConfig::builder().set(name, text).unwrap_err().to_string();
        assert_eq!(
            refused("stop-rule", "median"),
            "stop-rule: expected `auto` or `all` or `mean` or `sum` or `max-weight` or `mean-weight`, got \"median\""
        );
        assert_eq!(refused("segment", "1.5"), "segment: expected `auto` or a number of tokens, got \"1.5\"");
        assert_eq!(refused("q-perm", "true"), "q-perm: expected `on` or `off`, got \"true\"");
        assert_eq!(refused("workspace-mib", "NaN"), "workspace-mib: expected a number of MiB >= 0, got \"NaN\"");
        assert!("mean ".parse::<KeyScore>().unwrap_err().to_string().contains("`mean`, `second-cumulant`"));
    }

    #[test]
    fn numbers_out_of_range_are_refused_when_built() {
        let refused = |name, text| S2oConfig::builder().set(name, text).unwrap().build().unwrap_err().to_string();
        for got in ["-1", "1", "1.5", "NaN", "inf"] {
            assert_eq!(refused("tau", got), format!("tau: expected a number in [0, 1), got {got}"));
        }
        assert_eq!(refused("tile-k", "0"), "tile-k: expected 1 to 1024, got 0");
        assert_eq!(refused("tile-q", "1025"), "tile-q: expected 1 to 1024, got 1025");
        assert_eq!(refused("segment", "0"), "segment: expected a positive multiple of tile-q = 128, got 0");
        let expected = "probe-stride: expected a positive number of tokens, got 0; `off` turns probes off";
        assert_eq!(refused("probe-stride", "0"), expected);
        for got in [0.0, -0.5, f32::NAN, f32::INFINITY] {
            let error = S2oConfig::builder().max_error(got).build().unwrap_err();
            assert_eq!(error.to_string(), format!("max-error: expected a finite number above 0, got {got}"));
        }
        for (text, got) in
            [("second-cumulant=-1", "-1"), ("second-cumulant=NaN", "NaN"), ("second-cumulant=inf", "inf")]
        {
            let expected = format!("score: second-cumulant=c: expected a finite number >= 0, got {got}");
            assert_eq!(refused("score", text), expected);
        }
    }
}
