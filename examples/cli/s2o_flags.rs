//! The S2O options as flags, and the [`S2oConfig`] that they make.

use candle_core::Device;
use candle_s2o::{
    ConfigError, GainFrame, KeyScore, S2o, S2oConfig, S2oConfigBuilder, SegmentLen, StopRule, TriggeringTile,
};
use clap::{Args, ValueEnum};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// The settings that keep dense attention's answers
    Default,
    /// The paper's: mean-query score, mean rule, tau 0.005, S 2048, query permutation, no dense tail
    Paper,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rule {
    /// Every row's gain is below tau
    All,
    /// The mean over rows of gain / mass is below tau
    Mean,
    /// sum(gain) < tau * sum(mass) over the rows
    Sum,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LastTile {
    /// It is computed already: its contribution counts
    Keep,
    /// As the paper's Algorithm 3 is printed
    Discard,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Frame {
    /// Gain and mass relative to the maximum after the tile
    NewMax,
    /// The difference of the running sums, across maxima
    Literal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// One flag for each S2O option. A flag that is not given leaves the preset's value, so all of them are optional.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "S2O")]
pub struct S2oFlags {
    /// Options to start from; the flags below change them
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// Segment length S in tokens, a multiple of both tiles, or `auto`: by prompt length
    #[arg(long, value_name = "N|auto", value_parser = segment_len)]
    segment: Option<SegmentLen>,
    /// Threshold on the gain of a key tile, 0 <= tau < 1; 0 never stops, larger is sparser
    #[arg(long)]
    tau: Option<f32>,
    /// How the rows of a query tile decide to stop
    #[arg(long, value_name = "RULE")]
    stop_rule: Option<Rule>,
    /// How gain and mass are compared when the running maximum changes
    #[arg(long, value_name = "FRAME")]
    gain_frame: Option<Frame>,
    /// What happens to the tile whose gain was too small
    #[arg(long, value_name = "WHAT")]
    triggering_tile: Option<LastTile>,
    /// Score that orders the keys: `mean` (the paper's) or `second-cumulant[=C]`
    #[arg(long, value_name = "SCORE", value_parser = key_score)]
    score: Option<KeyScore>,
    /// Permute the queries of a segment too
    #[arg(long, value_name = "on|off")]
    q_perm: Option<Switch>,
    /// First tokens that come first in every key order
    #[arg(long, value_name = "N")]
    front_sink: Option<usize>,
    /// Last queries of the prompt that see every key
    #[arg(long, value_name = "N")]
    dense_tail: Option<usize>,
    /// Prompts shorter than this take the dense path
    #[arg(long, value_name = "TOKENS")]
    dense_below: Option<usize>,
    /// Queries in a tile, 1 to 1024
    #[arg(long, value_name = "N")]
    tile_q: Option<usize>,
    /// Keys in a tile, 1 to 1024
    #[arg(long, value_name = "N")]
    tile_k: Option<usize>,
    /// Most memory that key orders take at a time, in MiB
    #[arg(long, value_name = "MIB")]
    workspace_mib: Option<usize>,
    /// Layers that attend densely, such as `0,1`
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    skip_layers: Vec<usize>,
}

impl S2oFlags {
    /// Whether any of the flags was given.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }

    /// The preset with the given flags over it.
    pub fn config(&self) -> Result<S2oConfig, ConfigError> {
        let base = match self.preset {
            None | Some(Preset::Default) => S2oConfig::default(),
            Some(Preset::Paper) => S2oConfig::paper(),
        };
        let rule = self.stop_rule.map(|rule| match rule {
            Rule::All => StopRule::AllRows,
            Rule::Mean => StopRule::MeanRatio,
            Rule::Sum => StopRule::SumRatio,
        });
        let frame = self.gain_frame.map(|frame| match frame {
            Frame::NewMax => GainFrame::NewMax,
            Frame::Literal => GainFrame::Literal,
        });
        let tile = self.triggering_tile.map(|tile| match tile {
            LastTile::Keep => TriggeringTile::Keep,
            LastTile::Discard => TriggeringTile::Discard,
        });
        let workspace = self.workspace_mib.map(|mib| mib.saturating_mul(1 << 20));

        let builder = base.to_builder();
        let builder = with(builder, self.segment, S2oConfigBuilder::segment_len);
        let builder = with(builder, self.tau, S2oConfigBuilder::tau);
        let builder = with(builder, rule, S2oConfigBuilder::stop_rule);
        let builder = with(builder, frame, S2oConfigBuilder::gain_frame);
        let builder = with(builder, tile, S2oConfigBuilder::triggering_tile);
        let builder = with(builder, self.score, S2oConfigBuilder::key_score);
        let builder = with(builder, self.q_perm.map(|q| q == Switch::On), S2oConfigBuilder::q_perm);
        let builder = with(builder, self.front_sink, S2oConfigBuilder::front_sink);
        let builder = with(builder, self.dense_tail, S2oConfigBuilder::dense_tail);
        let builder = with(builder, self.dense_below, |builder, tokens| builder.dense_below(tokens));
        let builder = with(builder, self.tile_q, S2oConfigBuilder::tile_q);
        let builder = with(builder, self.tile_k, S2oConfigBuilder::tile_k);
        with(builder, workspace, S2oConfigBuilder::workspace_cap).build()
    }

    /// S2O with these options and statistics, to plug into a model.
    pub fn attention(&self) -> Result<S2o, ConfigError> {
        Ok(S2o::new(self.config()?).with_stats().skip_layers(self.skip_layers.iter().copied()))
    }

    /// The layers of `--skip-layers`; a layer that the model lacks is a mistake worth saying.
    pub fn check_layers(&self, num_layers: usize) -> anyhow::Result<()> {
        match self.skip_layers.iter().find(|layer| **layer >= num_layers) {
            Some(layer) => anyhow::bail!("--skip-layers: expected layers 0 to {}, got {layer}", num_layers - 1),
            None => Ok(()),
        }
    }
}

/// Prompt length from which S2O pays on a device.
fn break_even(device: &Device) -> usize {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => candle_s2o::cuda::BREAK_EVEN,
        _ => S2oConfig::CPU_BREAK_EVEN,
    }
}

/// The options in force for a prompt on a device, on one line.
pub fn describe(config: &S2oConfig, prompt_len: usize, device: &Device) -> String {
    let dense_below = config.dense_below().resolve(break_even(device));
    if prompt_len < dense_below {
        return format!("dense, because the prompt is shorter than {dense_below} tokens");
    }
    let auto = if config.segment_len() == SegmentLen::Auto { " (auto)" } else { "" };
    let rule = match config.stop_rule() {
        StopRule::AllRows => "all rows",
        StopRule::MeanRatio => "mean ratio",
        StopRule::SumRatio => "sum ratio",
    };
    let score = match config.key_score() {
        KeyScore::MeanQuery => "mean query".to_owned(),
        KeyScore::SecondCumulant { c } => format!("second cumulant {c}"),
    };
    format!(
        "segment {}{auto}, tau {} ({rule}), score {score}, dense tail {}, q-perm {}",
        config.segment_len().resolve(prompt_len),
        config.tau(),
        config.dense_tail(),
        if config.q_perm() { "on" } else { "off" },
    )
}

fn with<T>(
    builder: S2oConfigBuilder,
    value: Option<T>,
    set: fn(S2oConfigBuilder, T) -> S2oConfigBuilder,
) -> S2oConfigBuilder {
    match value {
        Some(value) => set(builder, value),
        None => builder,
    }
}

fn segment_len(text: &str) -> Result<SegmentLen, String> {
    match text {
        "auto" => Ok(SegmentLen::Auto),
        _ => text.parse().map(SegmentLen::Fixed).map_err(|_| "expected `auto` or a number of tokens".to_owned()),
    }
}

fn key_score(text: &str) -> Result<KeyScore, String> {
    let expected = || "expected `mean`, `second-cumulant` or `second-cumulant=C` with a number C".to_owned();
    match text.split_once('=') {
        None if text == "mean" => Ok(KeyScore::MeanQuery),
        None if text == "second-cumulant" => Ok(KeyScore::default()),
        Some(("second-cumulant", c)) => c.parse().map(|c| KeyScore::SecondCumulant { c }).map_err(|_| expected()),
        _ => Err(expected()),
    }
}
