//! The [`Attention`] methods of this crate: [`Dense`] and [`S2o`], and the length from which S2O is faster.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use s2o_core::{AttnStats, ConfigError, Mask, S2oConfig};

use crate::attention::{Attention, ChunkLedger, PrefillCall};
use crate::error::AttnError;
use crate::layer_settings::{LayerSettings, LayerSettingsError};
use crate::ops::{S2oOp, dense_attn};
use crate::pending_stats::PendingStats;

/// Measured on an H200 (docs/kernels.md).
const GPU_BREAK_EVEN: usize = 8192;

/// With heads of more than 128 columns on an H100 or H200, where dense attention runs on wgmma and sparse attention does not
/// (docs/swap.md).
#[cfg(feature = "cuda")]
const WIDE_BREAK_EVEN: usize = 20_480;

/// Prompt length in tokens from which S2O is faster than dense attention on a device ([`DenseBelow::Auto`]), with heads of
/// up to 128 columns on a GPU.
///
/// [`DenseBelow::Auto`]: crate::DenseBelow::Auto
pub fn break_even(device: &Device) -> usize {
    match device {
        Device::Cuda(_) => GPU_BREAK_EVEN,
        _ => S2oConfig::CPU_BREAK_EVEN,
    }
}

/// [`break_even`] for queries `q` (.., head_dim) on their device.
///
/// # Errors
/// If the GPU has no kernels.
pub fn break_even_of(q: &Tensor) -> std::result::Result<usize, AttnError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = q.device() {
        let head_dim = q.dims().last().copied().unwrap_or_default();
        return Ok(gpu_break_even(&s2o_cuda::Launcher::new(device)?, head_dim));
    }
    Ok(break_even(q.device()))
}

#[cfg(feature = "cuda")]
pub(crate) fn gpu_break_even(launcher: &s2o_cuda::Launcher, head_dim: usize) -> usize {
    if head_dim > 128 && launcher.is_sm90a() { WIDE_BREAK_EVEN } else { GPU_BREAK_EVEN }
}

/// Exact attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct Dense;

impl Attention for Dense {
    fn name(&self) -> &str {
        "dense"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(dense_attn(q, k, v, call.softmax_scale, Mask::Causal)?)
    }

    fn independent_queries(&self, _: &PrefillCall) -> usize {
        usize::MAX
    }
}

/// S2O with options that may differ between layers, and with optional statistics.
///
/// ```
/// use candle_s2o::{S2o, S2oConfig};
/// let attention = S2o::new(S2oConfig::default()).skip_layers([0, 1]).layer_tau(5, 0.01)?;
/// # Ok::<(), candle_s2o::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct S2o {
    config: S2oConfig,
    layers: BTreeMap<usize, S2oConfig>,
    /// Number of layers with settings. A call for a later layer is an error.
    num_layers: Option<usize>,
    knows_prompt_end: bool,
    collects_stats: bool,
    stats: ChunkLedger<Vec<PendingStats>>,
}

impl S2o {
    /// Uses the same options in every layer.
    pub fn new(config: S2oConfig) -> Self {
        Self {
            config,
            layers: BTreeMap::new(),
            num_layers: None,
            knows_prompt_end: true,
            collects_stats: false,
            stats: ChunkLedger::default(),
        }
    }

    /// Uses `config` with the tuned setting of each layer. A call for a layer beyond the settings is an error.
    /// [`LayerSettings::check`] also detects a model with fewer layers.
    ///
    /// # Errors
    /// If a setting does not fit the options.
    pub fn with_layers(config: S2oConfig, settings: &LayerSettings) -> std::result::Result<Self, LayerSettingsError> {
        let num_layers = settings.layers().len();
        let layers = (0..num_layers).map(|layer| Ok((layer, settings.config(layer, &config)?)));
        let layers = layers.collect::<std::result::Result<_, LayerSettingsError>>()?;
        Ok(Self { layers, num_layers: Some(num_layers), ..Self::new(config) })
    }

    /// Sets the options of one layer.
    pub fn layer_config(mut self, layer: usize, config: S2oConfig) -> Self {
        self.layers.insert(layer, config);
        self
    }

    /// Sets the threshold of one layer and keeps its other options.
    ///
    /// # Errors
    /// [`ConfigError::Tau`] if `tau` is outside `[0, 1)`.
    pub fn layer_tau(self, layer: usize, tau: f32) -> std::result::Result<Self, ConfigError> {
        let config = self.config_of(layer).to_builder().tau(tau).build()?;
        Ok(self.layer_config(layer, config))
    }

    /// Uses dense attention in the given layers.
    pub fn skip_layers(self, layers: impl IntoIterator<Item = usize>) -> Self {
        layers.into_iter().fold(self, |this, layer| {
            let dense = this.config_of(layer).to_builder().dense_below(usize::MAX).build();
            this.layer_config(layer, dense.expect("every dense threshold is valid"))
        })
    }

    /// Takes every chunk for the end of its prompt, as the drop-in for candle-flash-attn does in an engine with chunked
    /// prefill: `flash_attn` is not told where the prompt ends.
    pub fn without_prompt_end(mut self) -> Self {
        self.knows_prompt_end = false;
        self
    }

    /// The op of a call.
    ///
    /// # Errors
    /// If the layer has no settings.
    pub fn op(&self, call: &PrefillCall) -> std::result::Result<S2oOp, LayerSettingsError> {
        self.check_layer(call.layer)?;
        let op = S2oOp::new(call.softmax_scale, self.config_of(call.layer).clone());
        Ok(if self.knows_prompt_end { op.with_prompt_len(call.prompt_len) } else { op })
    }

    /// Collects statistics for [`S2o::take_stats`]. No call waits for a GPU: it keeps them until they are taken.
    pub fn with_stats(mut self) -> Self {
        self.collects_stats = true;
        self
    }

    /// Returns the options of a layer.
    pub fn config_of(&self, layer: usize) -> &S2oConfig {
        self.layers.get(&layer).unwrap_or(&self.config)
    }

    fn check_layer(&self, layer: usize) -> std::result::Result<(), LayerSettingsError> {
        match self.num_layers {
            Some(num_layers) if layer >= num_layers => Err(LayerSettingsError::Layer { num_layers, got: layer }),
            _ => Ok(()),
        }
    }

    /// Removes and returns the statistics of the last prompt by layer. Without [`S2o::with_stats`] the map is empty.
    /// Consecutive chunks are joined. A call that does not begin where the previous call ended begins a new prompt, so
    /// memory use does not grow from prompt to prompt. Waits for a GPU.
    ///
    /// # Errors
    /// If the GPU failed.
    pub fn take_stats(&self) -> std::result::Result<BTreeMap<usize, AttnStats>, AttnError> {
        let read = |(layer, chunks): (usize, Vec<PendingStats>)| {
            let mut joined = AttnStats::default();
            for chunk in chunks {
                joined.append(chunk.read()?);
            }
            Ok((layer, joined))
        };
        self.stats.take().into_iter().map(read).collect()
    }
}

impl Attention for S2o {
    fn name(&self) -> &str {
        "s2o"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let k_len = k.dim(1)?;
        let op = self.op(call).map_err(candle_core::Error::wrap)?;
        if !self.collects_stats {
            return Ok(op.apply(q, k, v)?);
        }
        let (out, stats) = op.apply_with_pending_stats(q, k, v)?;
        self.stats.record(call.layer, k_len - q.dim(1)?..k_len, |chunks| chunks.push(stats));
        Ok(out)
    }

    /// The dense tail. None with statistics, which are of all queries.
    fn independent_queries(&self, call: &PrefillCall) -> usize {
        match self.knows_prompt_end && !self.collects_stats {
            true => self.config_of(call.layer).dense_tail().resolve(call.prompt_len),
            false => 0,
        }
    }
}
