//! The S2O options as flags, and the [`S2oConfig`] that they make.

use std::path::PathBuf;

use anyhow::Context;
use candle_core::Device;
use candle_s2o::{LayerSettings, Preset, S2o, S2oConfig, S2oConfigBuilder, SegmentLen};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// The given S2O options by name, with one flag for each of [`S2oConfig::OPTIONS`].
#[derive(Debug, Clone, Default, PartialEq)]
struct GivenOptions(Vec<(&'static str, String)>);

impl Args for GivenOptions {
    fn augment_args(command: Command) -> Command {
        S2oConfig::OPTIONS.iter().fold(command, |command, option| {
            let name = option.name();
            let check = move |text: &str| S2oConfig::builder().set(name, text).map(|_| text.to_owned());
            let default = S2oConfig::default().get(name).expect("a name of the table");
            let help = format!("{} [{}] [default: {default}]", option.summary(), option.expected());
            command.arg(Arg::new(name).long(name).value_name("VALUE").value_parser(check).help(help))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for GivenOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |name: &'static str| Some((name, matches.get_one::<String>(name)?.clone()));
        Ok(Self(S2oConfig::OPTIONS.iter().filter_map(|option| given(option.name())).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The S2O options as flags. A flag that is not given leaves the preset's value.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "S2O")]
pub struct S2oFlags {
    /// Preset that the flags below change: `default`, or `paper` for the paper's settings [default: default]
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    #[command(flatten)]
    options: GivenOptions,
    /// Thresholds by layer, as `s2o evaluate tune` writes them
    #[arg(long, value_name = "FILE", conflicts_with = "tau")]
    layers_file: Option<PathBuf>,
    /// Layers with dense attention, such as `0,1` [default: none]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    skip_layers: Vec<usize>,
}

impl S2oFlags {
    /// The given flags, such as `--preset, --tau`; `None` if there are none.
    pub fn given(&self) -> Option<String> {
        let Self { preset, options, layers_file, skip_layers } = self;
        let own = [
            ("preset", preset.is_some()),
            ("layers-file", layers_file.is_some()),
            ("skip-layers", !skip_layers.is_empty()),
        ];
        let own = own.iter().filter(|(_, given)| *given).map(|(name, _)| *name);
        let names: Vec<String> =
            own.chain(options.0.iter().map(|(name, _)| *name)).map(|name| format!("--{name}")).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// The preset, changed by the given flags.
    pub fn config(&self) -> anyhow::Result<S2oConfig> {
        let base = self.preset.unwrap_or_default().config().to_builder();
        let set = self.options.0.iter().try_fold(base, |builder, (name, text)| builder.set(name, text));
        // The errors name options, whose flags have the same names.
        set.and_then(S2oConfigBuilder::build).map_err(|error| anyhow::anyhow!("--{error}"))
    }

    /// S2O with these options and with statistics, as an attention method for a model.
    pub fn attention(&self) -> anyhow::Result<S2o> {
        let config = self.config()?;
        let s2o = match self.settings()? {
            Some(settings) => S2o::with_layers(config, &settings)?,
            None => S2o::new(config),
        };
        Ok(s2o.with_stats().skip_layers(self.skip_layers.iter().copied()))
    }

    /// Refuses layers that the model lacks (`--skip-layers`), and settings for a different number of layers.
    pub fn check_layers(&self, num_layers: usize) -> anyhow::Result<()> {
        if let Some(layer) = self.skip_layers.iter().find(|layer| **layer >= num_layers) {
            anyhow::bail!("--skip-layers: expected layers 0 to {}, got {layer}", num_layers - 1);
        }
        Ok(self.settings()?.map_or(Ok(()), |settings| settings.check(num_layers))?)
    }

    /// Whether the threshold differs between layers.
    pub fn by_layer(&self) -> bool {
        self.layers_file.is_some()
    }

    /// The first given flag for a value that tuning has to find.
    pub fn tuned_flag(&self) -> Option<&'static str> {
        let given = [
            ("--tau", self.options.0.iter().any(|(name, _)| *name == "tau")),
            ("--layers-file", self.layers_file.is_some()),
            ("--skip-layers", !self.skip_layers.is_empty()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    fn settings(&self) -> anyhow::Result<Option<LayerSettings>> {
        self.layers_file.as_ref().map(LayerSettings::load).transpose().context("--layers-file")
    }
}

/// Prompts with fewer tokens than this are dense on a device.
pub fn dense_below(config: &S2oConfig, device: &Device) -> usize {
    config.dense_below().resolve(candle_s2o::break_even(device))
}

/// The options in effect for a prompt on a device, on one line.
pub fn describe(config: &S2oConfig, by_layer: bool, prompt_len: usize, device: &Device) -> String {
    let dense_below = dense_below(config, device);
    if prompt_len < dense_below {
        return format!("dense path: the prompt is shorter than {dense_below} tokens (--dense-below)");
    }
    let auto = if config.segment_len() == SegmentLen::Auto { " (auto)" } else { "" };
    let segment = config.segment_len().resolve(prompt_len);
    let tau = if by_layer { "by layer".to_owned() } else { config.tau().resolve(prompt_len).to_string() };
    let probes = config.probe_stride().resolve(prompt_len, segment, config.max_error().is_some());
    let rule = config.stop_rule().resolve(probes.is_some(), prompt_len);
    let [score, q_perm] = ["score", "q-perm"].map(|name| options(config, &[name]));
    let tail = config.dense_tail().resolve(prompt_len);
    let probes = probes.map(|tokens| format!(", a probe every {tokens} queries")).unwrap_or_default();
    let bound = config.max_error().map(|error| format!(", error at most {error}")).unwrap_or_default();
    format!("segment {segment}{auto}, tau {tau}, stop-rule {rule}, {score}, dense-tail {tail}, {q_perm}{probes}{bound}")
}

/// All options except the threshold, on one line.
pub fn describe_untuned(config: &S2oConfig) -> String {
    options(config, &["segment", "stop-rule", "score", "dense-tail", "q-perm"])
}

/// Options and their values in the syntax of the flags.
fn options(config: &S2oConfig, names: &[&str]) -> String {
    let values = names.iter().filter_map(|name| Some(format!("{name} {}", config.get(name)?)));
    values.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_in_effect_are_those_of_the_prompt() {
        let default = S2oConfig::default();
        let line = |config: &S2oConfig, prompt_len| describe(config, false, prompt_len, &Device::Cpu);
        assert!(line(&default, 8192).starts_with("segment 512 (auto), tau 0.019, stop-rule all, "));
        assert!(line(&default, 32768).starts_with("segment 1024 (auto), tau 0.0225, stop-rule mean-weight, "));
        assert!(line(&default, 32768).ends_with(", dense-tail 64, q-perm off, a probe every 256 queries"));
        assert!(line(&default, 8192).ends_with(", dense-tail 128, q-perm off"));
        let fixed = S2oConfig::builder().tau(0.3).max_error(0.1).build().unwrap();
        assert!(line(&fixed, 32768).contains(", tau 0.3, ") && line(&fixed, 8192).ends_with(", error at most 0.1"));
        assert!(describe(&default, true, 32768, &Device::Cpu).contains(", tau by layer, "));
        assert_eq!(line(&default, 100), "dense path: the prompt is shorter than 2048 tokens (--dense-below)");
    }
}
