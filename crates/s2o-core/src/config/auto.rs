//! The options that may be `auto`, by prompt length or device. [`FromStr`] parses the text that
//! [`Display`](fmt::Display) writes.

use std::fmt;
use std::str::FromStr;

use super::values::ValueError;

/// Implements [`FromStr`] and `Display` for an enum of `Auto`, a number, and other words.
macro_rules! auto_or {
    ($number:literal, $type:ident: $variant:ident $(, $word:literal => $other:ident)*) => {
        impl $type {
            pub(super) const EXPECTED: &str = concat!($("`", $word, "`, ",)* "`auto` or ", $number);
        }

        impl FromStr for $type {
            type Err = ValueError;

            fn from_str(text: &str) -> Result<Self, ValueError> {
                match text {
                    "auto" => Ok(Self::Auto),
                    $($word => Ok(Self::$other),)*
                    _ => text.parse().map(Self::$variant).map_err(|_| ValueError::new(Self::EXPECTED, text)),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Self::Auto => f.write_str("auto"),
                    $(Self::$other => f.write_str($word),)*
                    Self::$variant(number) => number.fmt(f),
                }
            }
        }
    };
}

/// Threshold for the gain of a key tile relative to the softmax mass so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tau {
    /// `auto`, by prompt length: 0.019 below 12K tokens, 0.015 to 24K, 0.0225 to 48K, 0.02 to 96K, 0.025 above. The rules by
    /// single weights have their own scale. On needle-11m it loses 0 points of RULER's mean score at 16K, .9 at 32K and .7 at
    /// 64K, where 0.015 loses .3 and .4, and .5 to 2.4 at 128K, by the prompts (docs/results-answers.md). A later chunk of a
    /// prompt whose end is not known has 0.02 from 24K on ([`Tau::of_chunk`]).
    Auto,
    /// The same threshold for every prompt.
    Fixed(f32),
}

auto_or!("a number in [0, 1)", Tau: Fixed);

impl Tau {
    /// Length in tokens of the longest prompt with the automatic threshold, probes and dense tail of short prompts.
    const SHORT_PROMPT: usize = 24 * 1024;
    /// Length in tokens of the longest prompt with the automatic threshold of 32K tokens.
    const MEDIUM_PROMPT: usize = 48 * 1024;
    /// Length in tokens of the longest prompt whose automatic stop rule is that of shorter prompts with probes.
    pub(crate) const LONG_PROMPT: usize = 96 * 1024;

    /// The threshold for a prompt of `prompt_len` tokens.
    pub fn resolve(self, prompt_len: usize) -> f32 {
        match self {
            Self::Fixed(tau) => tau,
            Self::Auto if prompt_len < ProbeStride::PAYS_FROM => 0.019,
            Self::Auto if prompt_len <= Self::SHORT_PROMPT => 0.015,
            Self::Auto if prompt_len <= Self::MEDIUM_PROMPT => 0.0225,
            Self::Auto if prompt_len <= Self::LONG_PROMPT => 0.02,
            Self::Auto => 0.025,
        }
    }

    /// The threshold of a chunk after the first that ends at `k_len` tokens, if the end of its prompt is not known: `auto` is
    /// 0.02 above 24K tokens, also above 96K.
    pub fn of_chunk(self, k_len: usize) -> f32 {
        match self {
            Self::Auto if k_len > Self::SHORT_PROMPT => 0.02,
            tau => tau.resolve(k_len),
        }
    }
}

impl From<f32> for Tau {
    fn from(tau: f32) -> Self {
        Self::Fixed(tau)
    }
}

/// Number of tokens in a segment (the paper's S). All queries of a segment share one key order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentLen {
    /// `auto`, by prompt length: 256 up to 4K tokens, 512 up to 16K, 1024 up to 48K, 2048 up to 384K, 4096 beyond.
    Auto,
    /// The same length for every prompt.
    Fixed(usize),
}

auto_or!("a number of tokens", SegmentLen: Fixed);

impl SegmentLen {
    /// Segment length in tokens for a prompt of `prompt_len` tokens.
    pub fn resolve(self, prompt_len: usize) -> usize {
        const K: usize = 1024;
        match self {
            Self::Fixed(len) => len,
            Self::Auto if prompt_len <= 4 * K => 256,
            Self::Auto if prompt_len <= 16 * K => 512,
            Self::Auto if prompt_len <= 48 * K => 1024,
            Self::Auto if prompt_len <= 384 * K => 2048,
            Self::Auto => 4096,
        }
    }
}

/// Number of queries at the end of a prompt that see every key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseTail {
    /// `auto`, by prompt length: 128 up to 24K tokens, 64 above. At 32K RULER's mean score is the same, and the hidden states at
    /// the prompt's end are 7 % further from exact ones; at 4K they would be 70 % further (docs/algorithm.md).
    Auto,
    /// The same number for every prompt.
    Tokens(usize),
}

auto_or!("a number of tokens", DenseTail: Tokens);

impl DenseTail {
    /// The number for a prompt of `prompt_len` tokens, which may be shorter.
    pub fn resolve(self, prompt_len: usize) -> usize {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Auto if prompt_len <= Tau::SHORT_PROMPT => 128,
            Self::Auto => 64,
        }
    }
}

impl From<usize> for DenseTail {
    fn from(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }
}

/// Distance of exact probe queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeStride {
    /// `off`: no probes.
    Off,
    /// `auto`: eight probes in each whole segment of a prompt of at least [`ProbeStride::PAYS_FROM`] tokens. Above 24K tokens
    /// they are at least 256 tokens apart, but four in a segment; with a bound on the error there are eight. Shorter prompts
    /// have probes only if the error has a bound.
    Auto,
    /// One query in so many positions, for every prompt.
    Every(usize),
}

auto_or!("a number of tokens", ProbeStride: Every, "off" => Off);

impl ProbeStride {
    /// Prompt length in tokens from which `auto` has probes: the shortest measured length at which they lowered the error
    /// of all layers but one of two models, in 15 % less to 10 % more time (docs/algorithm.md).
    pub const PAYS_FROM: usize = 12 * 1024;

    /// The distance in tokens in segments of `segment_len` tokens of a prompt of `prompt_len` tokens; `None` without
    /// probes. An error with a bound needs probes: then `off` is `auto`, in prompts of every length.
    pub fn resolve(self, prompt_len: usize, segment_len: usize, has_bound: bool) -> Option<usize> {
        match self {
            Self::Every(tokens) => Some(tokens),
            Self::Off if !has_bound => None,
            Self::Auto if !has_bound && prompt_len < Self::PAYS_FROM => None,
            Self::Auto if !has_bound && prompt_len > Tau::SHORT_PROMPT => {
                Some((segment_len / 8).max(256.min(segment_len / 4)).max(1))
            }
            Self::Off | Self::Auto => Some((segment_len / 8).max(1)),
        }
    }
}

/// Prompt length in tokens below which a call uses the dense path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseBelow {
    /// `auto`: the measured break-even of the backend, on the CPU
    /// [`S2oConfig::CPU_BREAK_EVEN`](super::S2oConfig::CPU_BREAK_EVEN).
    Auto,
    /// The same length on every backend.
    Tokens(usize),
}

auto_or!("a number of tokens", DenseBelow: Tokens);

impl DenseBelow {
    /// The length in tokens, for a backend with this break-even.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StopRule;

    #[test]
    fn automatic_segments_are_longer_in_longer_prompts() {
        const K: usize = 1024;
        for (prompt_len, segment) in [
            (1, 256),
            (4 * K, 256),
            (4 * K + 1, 512),
            (16 * K, 512),
            (16 * K + 1, 1024),
            (48 * K, 1024),
            (48 * K + 1, 2048),
            (384 * K, 2048),
            (384 * K + 1, 4096),
            (1 << 20, 4096),
        ] {
            assert_eq!(SegmentLen::Auto.resolve(prompt_len), segment, "{prompt_len}");
            assert_eq!(SegmentLen::Fixed(384).resolve(prompt_len), 384);
        }
    }

    #[test]
    fn the_automatic_tail_is_shorter_in_longer_prompts() {
        for (prompt_len, tail) in [(1, 128), (24 * 1024, 128), (24 * 1024 + 1, 64), (1 << 20, 64)] {
            assert_eq!(DenseTail::Auto.resolve(prompt_len), tail, "{prompt_len}");
            assert_eq!(DenseTail::from(100).resolve(prompt_len), 100);
        }
    }

    #[test]
    fn threshold_and_rule_depend_on_the_length() {
        const K: usize = 1024;
        for (prompt_len, tau) in
            [(1, 0.019), (12 * K - 1, 0.019), (12 * K, 0.015), (24 * K, 0.015), (24 * K + 1, 0.0225), (48 * K, 0.0225)]
                .into_iter()
                .chain([(48 * K + 1, 0.02), (96 * K, 0.02), (96 * K + 1, 0.025), (1 << 20, 0.025)])
        {
            assert_eq!(Tau::Auto.resolve(prompt_len), tau, "{prompt_len}");
            assert_eq!(Tau::from(0.3).resolve(prompt_len), 0.3);
        }
        for (prompt_len, rule) in
            [(1, StopRule::MeanWeight), (96 * K, StopRule::MeanWeight), (96 * K + 1, StopRule::MaxWeight)]
        {
            assert_eq!(StopRule::Auto.resolve(true, prompt_len), rule, "{prompt_len}");
            assert_eq!(StopRule::Auto.resolve(false, prompt_len), StopRule::AllRows);
        }
        for (k_len, tau) in [(8 * K, 0.019), (12 * K, 0.015), (24 * K, 0.015), (24 * K + 1, 0.02), (128 * K, 0.02)] {
            assert_eq!(Tau::Auto.of_chunk(k_len), tau, "{k_len}");
            assert_eq!(Tau::from(0.3).of_chunk(k_len), 0.3);
        }
    }

    #[test]
    fn probes_are_automatic_where_they_pay_or_an_error_has_a_bound() {
        let (short, long) = (12 * 1024 - 1, 12 * 1024);
        for (stride, of_short, of_long, with_bound) in [
            (ProbeStride::Off, None, None, Some(128)),
            (ProbeStride::Auto, None, Some(128), Some(128)),
            (ProbeStride::Every(96), Some(96), Some(96), Some(96)),
        ] {
            assert_eq!(stride.resolve(short, 1024, false), of_short);
            assert_eq!(stride.resolve(long, 1024, false), of_long);
            assert_eq!(stride.resolve(short, 1024, true), with_bound);
        }
        assert_eq!(ProbeStride::Auto.resolve(long, 4, false), Some(1));
        let (last, first) = (24 * 1024, 24 * 1024 + 1);
        for (segment_len, eight, fewer) in
            [(3, 1, 1), (512, 64, 128), (1024, 128, 256), (2048, 256, 256), (4096, 512, 512)]
        {
            assert_eq!(ProbeStride::Auto.resolve(last, segment_len, false), Some(eight));
            assert_eq!(ProbeStride::Auto.resolve(first, segment_len, false), Some(fewer));
            assert_eq!(ProbeStride::Auto.resolve(first, segment_len, true), Some(eight));
        }
    }
}
