//! Flags for the model, its source and its precision; and loading it, with progress.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_s2o::Attention;
use clap::{Args, ValueEnum};
use s2o_eval::capture::{LayerTensors, capture};
use s2o_models::weights::synthetic::{self, Profile, Synthetic};
use s2o_models::{Chunk, KvStorage, LinearPrecision, LoadOptions, LoadedModel, ModelSource, PrefillOptions};

use crate::progress;
use crate::ranks::Ranks;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    F32,
    Bf16,
    F16,
    /// The quantised weights of a .gguf file as they are
    Gguf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Linear {
    /// 8-bit integers, rotated, with a scale for each output and each token; NVIDIA H100 and H200
    Int8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// 8-bit integers with a scale for each row of a head: half of the memory of bf16
    #[value(name = "8bit")]
    Int8,
    /// Memory of the host, for a prompt whose cache the GPU cannot hold; decoding is then slow
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SyntheticWeights {
    /// Attention with the sinks, stripes and locality that were measured on trained models
    Calibrated,
    /// Nearly uniform attention, unlike that of trained models
    Random,
}

/// Flags for the model and its prefill chunks.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    #[command(flatten)]
    load: LoadFlags,
    /// Tokens per prefill chunk, which limits the memory of activations: a number, `whole`, or `auto`: 8192 on a CPU,
    /// by the free memory on a GPU
    #[arg(long, value_name = "TOKENS", default_value = "auto")]
    pub chunk: Chunk,
}

/// Flags for the model to load.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadFlags {
    /// `needle-11m` (built in), a directory, a .gguf file, or a Hugging Face id such as meta-llama/Llama-3.1-8B
    #[arg(long, visible_alias = "model-id", value_name = "MODEL", default_value = "needle-11m")]
    model: String,
    /// Branch, tag or commit of a Hugging Face id [default: main]
    #[arg(long)]
    revision: Option<String>,
    /// Made-up weights in the shape of llama-3.1-8b, llama-3.1-70b, qwen3-8b or a config.json, for timing without real
    /// weights; the generated text means nothing
    #[arg(long, value_name = "SHAPE", conflicts_with_all = ["model", "revision", "tokenizer_file"])]
    synthetic: Option<String>,
    /// Attention of synthetic weights [default: calibrated]
    #[arg(long, value_name = "KIND", requires = "synthetic")]
    synthetic_weights: Option<SyntheticWeights>,
    /// Concentration of the attention of calibrated weights: 1 as measured, more is sparser [default: 1]
    #[arg(long, value_name = "FACTOR", requires = "synthetic")]
    synthetic_focus: Option<f64>,
    /// The tokenizer.json to use [default: the model's own]
    #[arg(long, value_name = "FILE")]
    tokenizer_file: Option<PathBuf>,
    /// Precision of weights, activations and KV cache [default: f32 on a CPU, bf16 on a GPU; the quantised weights of a
    /// .gguf file stay quantised on a CPU]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Precision>,
    /// Precision of the linear layers inside the decoder, not of embedding, output head, attention and cache [default:
    /// that of --dtype]
    #[arg(long, value_name = "PRECISION")]
    linear: Option<Linear>,
    /// Precision or place of the KV cache [default: that of --dtype, on the device]
    #[arg(long, value_name = "STORAGE")]
    kv: Option<Kv>,
    /// Device: cpu, cuda or cuda:N [default: the first GPU in a build with the feature cuda, otherwise the CPU]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
    /// The same as `--device cpu`
    #[arg(long, conflicts_with = "device")]
    cpu: bool,
}

impl ModelFlags {
    pub fn device(&self) -> Result<Device> {
        self.load.device()
    }

    pub fn load(&self) -> Result<LoadedModel> {
        self.load.load()
    }

    /// The model, or the part of this rank, on its device.
    pub fn load_shared(&self, ranks: Option<&Ranks>) -> Result<LoadedModel> {
        self.load_in(self.load.linear_precision(), ranks)
    }

    /// The model with the linear layers as its weights are, if [`Self::load_shared`] has them in another precision.
    pub fn load_as_read(&self, ranks: Option<&Ranks>) -> Result<Option<LoadedModel>> {
        match self.load.linear_precision() {
            LinearPrecision::AsRead => Ok(None),
            LinearPrecision::Int8 => self.load_in(LinearPrecision::AsRead, ranks).map(Some),
        }
    }

    fn load_in(&self, linear: LinearPrecision, ranks: Option<&Ranks>) -> Result<LoadedModel> {
        let Some(ranks) = ranks else {
            return self.load.load_with(LoadOptions { linear, ..self.load.options()? });
        };
        let device = self.load.device_of_rank(ranks)?;
        let parallel = Some(ranks.parallel(&device)?);
        self.load.load_with(LoadOptions { device, parallel, linear, ..self.load.options_without_device()? })
    }

    /// Refuses more ranks on this host than it has devices for.
    pub fn check_gpus(&self, expected: usize) -> Result<()> {
        self.load.check_gpus(expected)
    }

    /// Writes the synthetic model to a directory and says what it wrote.
    pub fn save(&self, directory: &Path) -> Result<String> {
        let ModelSource::Synthetic(model) = self.load.source()? else {
            bail!("--save: expected a model of --synthetic, got {}", self.load.model);
        };
        let options = self.load.options()?;
        let dtype = options.dtype.unwrap_or(DType::BF16);
        let bytes = progress::during("saving", 0, "tensors", |report| {
            model.save(directory, dtype, &options.device, Some(report))
        })?;
        let (name, gigabytes) = (model.name(), bytes as f64 / 1e9);
        Ok(format!("{}: {name}, {gigabytes:.2} GB of weights in {}\n", directory.display(), dtype.as_str()))
    }

    /// The name and the positions of the model, before its weights are read; `None` for a model on the hub.
    pub fn positions(&self) -> Result<Option<(String, usize)>> {
        let source = self.load.source()?;
        Ok(source.config()?.map(|config| (source.name(), config.max_positions)))
    }

    /// Prefills a prompt with `attention`, for its effects.
    pub fn prefill(&self, phase: &str, model: &LoadedModel, prompt: &[u32], attention: &dyn Attention) -> Result<()> {
        let tokens = model.prompt(prompt)?;
        let mut cache = model.decoder.new_cache(1, prompt.len())?;
        progress::during(phase, prompt.len(), "tokens", |report| {
            let options = PrefillOptions::new().chunk(self.chunk).on_progress(report);
            let logits = model.decoder.prefill(&tokens, &mut cache, attention, options)?.last_logits()?;
            Ok(cache.check_logits(&logits)?)
        })
    }

    /// Prefills a prompt densely and returns queries, keys and values of some layers.
    pub fn capture(
        &self,
        phase: &str,
        model: &LoadedModel,
        prompt: &[u32],
        layers: &[usize],
    ) -> Result<Vec<LayerTensors>> {
        Ok(progress::during(phase, prompt.len(), "tokens", |report| {
            capture(model, prompt, self.chunk, layers, report)
        })?)
    }
}

impl LoadFlags {
    pub fn device(&self) -> Result<Device> {
        match self.device_name() {
            DeviceName::Cpu => Ok(Device::Cpu),
            DeviceName::Cuda(number) => open_gpu(number),
        }
    }

    fn device_name(&self) -> DeviceName {
        match (self.device, self.cpu) {
            (None, false) if cfg!(feature = "cuda") => DeviceName::Cuda(0),
            (None, _) => DeviceName::Cpu,
            (Some(name), _) => name,
        }
    }

    pub fn load(&self) -> Result<LoadedModel> {
        self.load_with(self.options()?)
    }

    fn load_with(&self, options: LoadOptions) -> Result<LoadedModel> {
        let source = self.source()?;
        if let Some(bytes) = source.dequantised_bytes(&options)? {
            let gigabytes = bytes as f64 / 1e9;
            progress::say(&format!("{}: the weights are dequantised and take {gigabytes:.2} GB", self.model));
        }
        Ok(progress::during("loading", 0, "layers", |report| source.load(&options, Some(report)))?)
    }

    /// A rank that this program started has the GPU of its number.
    fn device_of_rank(&self, ranks: &Ranks) -> Result<Device> {
        match (self.device_name(), ranks.gpu()) {
            (DeviceName::Cpu, _) => Ok(Device::Cpu),
            (DeviceName::Cuda(number), gpu) => open_gpu(gpu.unwrap_or(number)),
        }
    }

    fn check_gpus(&self, gpus: usize) -> Result<()> {
        match (self.device, self.device_name()) {
            (Some(DeviceName::Cuda(number)), _) => {
                bail!(
                    "--gpus {gpus}: expected no --device with it, got cuda:{number}; CUDA_VISIBLE_DEVICES selects GPUs"
                )
            }
            (None, DeviceName::Cpu) if !self.cpu => {
                bail!(
                    "--gpus {gpus}: expected a build for GPUs, got one without; build with --features cuda, or add --cpu"
                )
            }
            #[cfg(feature = "cuda")]
            (_, DeviceName::Cuda(_)) => {
                let got = s2o_models::gpu_count()?;
                anyhow::ensure!(gpus <= got, "--gpus: expected at most {got}, the GPUs of this host, got {gpus}");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn linear_precision(&self) -> LinearPrecision {
        match self.linear {
            Some(Linear::Int8) => LinearPrecision::Int8,
            None => LinearPrecision::AsRead,
        }
    }

    fn options(&self) -> Result<LoadOptions> {
        Ok(LoadOptions { device: self.device()?, ..self.options_without_device()? })
    }

    fn options_without_device(&self) -> Result<LoadOptions> {
        let source = self.source()?;
        if self.dtype == Some(Precision::Gguf) && !matches!(source, ModelSource::Gguf(_)) {
            bail!("--dtype gguf: expected a .gguf file as --model, got {}", source.name());
        }
        Ok(LoadOptions {
            dtype: match self.dtype {
                Some(Precision::F32) => Some(DType::F32),
                Some(Precision::Bf16) => Some(DType::BF16),
                Some(Precision::F16) => Some(DType::F16),
                Some(Precision::Gguf) | None => None,
            },
            keep_quantised: (self.dtype == Some(Precision::Gguf)).then_some(true),
            linear: self.linear_precision(),
            kv: match self.kv {
                Some(Kv::Int8) => KvStorage::Int8,
                Some(Kv::Host) => KvStorage::Host,
                None => KvStorage::AsComputed,
            },
            tokenizer: self.tokenizer_file.clone(),
            ..LoadOptions::default()
        })
    }

    /// Whether the weights are synthetic, so that only time can be measured.
    pub fn is_synthetic(&self) -> bool {
        self.synthetic.is_some()
    }

    fn source(&self) -> Result<ModelSource> {
        if let Some(shape) = &self.synthetic {
            let profile = match (self.synthetic_weights, self.synthetic_focus) {
                (Some(SyntheticWeights::Random), None) => Profile::Random,
                (Some(SyntheticWeights::Random), Some(focus)) => {
                    bail!("--synthetic-focus: expected calibrated weights, got {focus} for random ones")
                }
                (_, None) => Profile::default(),
                (_, Some(focus)) if !(0.0..=Profile::MAX_FOCUS).contains(&focus) => {
                    bail!("--synthetic-focus: expected a number from 0 to {}, got {focus}", Profile::MAX_FOCUS)
                }
                (_, Some(focus)) => Profile::Calibrated { focus },
            };
            return Ok(ModelSource::Synthetic(Synthetic { shape: shape.parse()?, profile, seed: synthetic::SEED }));
        }
        match (self.model.parse()?, &self.revision) {
            (ModelSource::Hub { id, .. }, Some(revision)) => Ok(ModelSource::Hub { id, revision: revision.clone() }),
            (_, Some(_)) => bail!("--revision: expected a Hugging Face id as --model, got {}", self.model),
            (source, None) => Ok(source),
        }
    }
}

/// The value of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceName {
    Cpu,
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let unknown = || format!("expected cpu, cuda or cuda:N, got {name}");
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => number.parse().map(Self::Cuda).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

fn open_gpu(number: usize) -> Result<Device> {
    if cfg!(not(feature = "cuda")) {
        bail!("--device cuda: expected a build for GPUs, got one without; build with --features cuda")
    }
    s2o_models::gpu(number).with_context(|| format!("--device cuda:{number}"))
}

/// Name, shape and precision on one line.
pub fn describe(model: &LoadedModel) -> String {
    let config = model.config();
    format!(
        "{}: {:?}, {} parameters, {} layers, {} query and {} KV heads of {}, {}",
        model.name,
        config.architecture,
        count(model.num_parameters()),
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        model.decoder.precision(),
    )
}

fn count(number: usize) -> String {
    match number as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n => format!("{:.1}M", n / 1e6),
    }
}
