//! The S2O options as flags, and the [`S2oConfig`] that they make.

use std::path::PathBuf;

use candle_core::Device;
use candle_s2o::{
    ConfigError, GainFrame, KeyScore, LayerSettings, LayerSettingsError, S2o, S2oConfig, S2oConfigBuilder, SegmentLen,
    StopRule, TriggeringTile,
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
    /// Thresholds by layer, as `evaluate tune` finds them
    #[arg(long, value_name = "FILE", conflicts_with = "tau")]
    layers_file: Option<PathBuf>,
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
    pub fn attention(&self) -> anyhow::Result<S2o> {
        let config = self.config()?;
        let s2o = match self.settings()? {
            Some(settings) => S2o::with_layers(config, &settings)?,
            None => S2o::new(config),
        };
        Ok(s2o.with_stats().skip_layers(self.skip_layers.iter().copied()))
    }

    /// Refuses layers that the model lacks (`--skip-layers`), and settings for another number of layers.
    pub fn check_layers(&self, num_layers: usize) -> anyhow::Result<()> {
        if let Some(layer) = self.skip_layers.iter().find(|layer| **layer >= num_layers) {
            anyhow::bail!("--skip-layers: expected layers 0 to {}, got {layer}", num_layers - 1);
        }
        Ok(self.settings()?.map_or(Ok(()), |settings| settings.check(num_layers))?)
    }

    /// Whether the threshold differs from layer to layer.
    pub fn by_layer(&self) -> bool {
        self.layers_file.is_some()
    }

    /// The flag, if one was given, that says what tuning is to find.
    pub fn tuned_flag(&self) -> Option<&'static str> {
        let given = [
            ("--tau", self.tau.is_some()),
            ("--layers-file", self.layers_file.is_some()),
            ("--skip-layers", !self.skip_layers.is_empty()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    fn settings(&self) -> Result<Option<LayerSettings>, LayerSettingsError> {
        self.layers_file.as_ref().map(LayerSettings::load).transpose()
    }
}

/// Prompts below this many tokens are dense on a device.
pub fn dense_below(config: &S2oConfig, device: &Device) -> usize {
    config.dense_below().resolve(candle_s2o::break_even(device))
}

/// The options in force for a prompt on a device, on one line.
pub fn describe(config: &S2oConfig, by_layer: bool, prompt_len: usize, device: &Device) -> String {
    let dense_below = dense_below(config, device);
    if prompt_len < dense_below {
        return format!("dense, because the prompt is shorter than {dense_below} tokens");
    }
    let auto = if config.segment_len() == SegmentLen::Auto { " (auto)" } else { "" };
    let segment = config.segment_len().resolve(prompt_len);
    let tau = if by_layer { "by layer".to_owned() } else { config.tau().to_string() };
    format!("segment {segment}{auto}, tau {tau} ({}), {}", stop_rule(config), others(config))
}

/// The options beside the threshold, on one line.
pub fn describe_untuned(config: &S2oConfig) -> String {
    format!("segment {}, {}, {}", config.segment_len(), stop_rule(config), others(config))
}

fn stop_rule(config: &S2oConfig) -> &'static str {
    match config.stop_rule() {
        StopRule::AllRows => "all rows",
        StopRule::MeanRatio => "mean ratio",
        StopRule::SumRatio => "sum ratio",
    }
}

fn others(config: &S2oConfig) -> String {
    let score = match config.key_score() {
        KeyScore::MeanQuery => "mean query".to_owned(),
        KeyScore::SecondCumulant { c } => format!("second cumulant {c}"),
    };
    let q_perm = if config.q_perm() { "on" } else { "off" };
    format!("score {score}, dense tail {}, q-perm {q_perm}", config.dense_tail())
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
