//! Sources of models: the embedded model, a directory, a GGUF file, the hub, or synthetic weights.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use tokenizers::Tokenizer;

use crate::config::DecoderConfig;
use crate::decoder::{Decoder, Progress, check_dtype};
use crate::error::{ModelError, Result};
use crate::fused::LinearPrecision;
use crate::kv_cache::KvStorage;
use crate::layers::{Quantised, Weights};
use crate::model::LoadedModel;
use crate::parallel::Parallel;

mod gguf;
mod gguf_spm;
mod gguf_tokenizer;
mod hub;
#[cfg(feature = "hub")]
mod hub_download;
mod safetensors;
pub mod synthetic;
mod tokenizer_file;

#[cfg(feature = "hub")]
use hub_download::fetch;
use synthetic::Synthetic;
use tokenizer_file::read_tokenizer;

pub use hub::HubOptions;

/// Refuses weights with a tensor that the model does not use: its configuration is that of another model, or something
/// that it needs, such as the scales of quantised weights, would be left out. Stored frequencies of the rotation, and
/// an output head that is the embedding, may be there.
fn refuse_unused<'n>(
    config: &DecoderConfig,
    names: impl IntoIterator<Item = &'n str>,
    own_name: impl Fn(&str) -> String,
    path: &Path,
) -> Result<()> {
    let used: HashSet<String> = config.tensor_shapes().iter().map(|(name, _)| own_name(name)).collect();
    let head = own_name("lm_head.weight");
    let is_unused = |name: &&str| {
        let may_be_there = *name == head || name.ends_with("rotary_emb.inv_freq") || name.starts_with("rope_freqs.");
        !may_be_there && !used.contains(*name)
    };
    // Of several, always the same.
    let Some(name) = names.into_iter().filter(is_unused).min() else { return Ok(()) };
    let layers = config.num_layers;
    let reason = format!("tensor `{name}`: expected only those of the configured model with {layers} layers");
    Err(ModelError::InvalidWeights { path: path.to_owned(), reason })
}

/// Name of the embedded model.
pub const EMBEDDED: &str = "needle-11m";

/// A source of a model. Parses from a string: `needle-11m`, a directory, a path that ends in `.gguf`, or
/// `org/name[@revision]`. An existing directory has priority over a hub id of the same form.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSource {
    /// needle-11m, the 11M-parameter Qwen3 model inside this library.
    Embedded,
    /// A directory with `config.json`, safetensors weights and `tokenizer.json`.
    Directory(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// A repository on the Hugging Face hub.
    Hub {
        /// `org/name`.
        id: String,
        /// Branch, tag or commit.
        revision: String,
    },
    /// Synthetic weights in a real model's shape, for timing. No string parses to this, so it is never used by mistake.
    Synthetic(Synthetic),
}

impl FromStr for ModelSource {
    type Err = ModelError;

    fn from_str(source: &str) -> Result<Self> {
        let path = Path::new(source);
        if source == EMBEDDED {
            return Ok(Self::Embedded);
        }
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            return Ok(Self::Gguf(path.to_owned()));
        }
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        // `org/model.safetensors` has the form of a hub id.
        if path.is_file() || path.extension().is_some_and(|extension| extension == "safetensors") {
            let directory = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
            return Err(ModelError::FileOfModel { got: source.to_owned(), directory: directory.display().to_string() });
        }
        if let Some((id, revision)) = hub::parse_id(source) {
            return Ok(Self::Hub { id, revision });
        }
        if source.starts_with(['.', '/', '~']) || source.contains(std::path::MAIN_SEPARATOR) {
            // Looks like a path, so loading reports a missing file instead of an invalid source.
            return Ok(Self::Directory(path.to_owned()));
        }
        Err(ModelError::InvalidSource { got: source.to_owned() })
    }
}

/// Options for loading a model.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The device of weights and computation.
    pub device: Device,
    /// Dtype of weights, activations and cache: f32, bf16 or f16. `None` is f32 on a CPU and bf16 elsewhere.
    pub dtype: Option<DType>,
    /// Whether the quantised matrices of a GGUF file stay quantised. `None`: on a CPU, where prefill is not slower for
    /// it, if no dtype is given.
    pub keep_quantised: Option<bool>,
    /// Precision of the linear layers inside the decoder.
    pub linear: LinearPrecision,
    /// Precision and place of the KV caches.
    pub kv: KvStorage,
    /// A `tokenizer.json` to use instead of the model's own.
    pub tokenizer: Option<PathBuf>,
    /// Hub, cache and access token.
    pub hub: HubOptions,
    /// The ranks that run the decoder together; `None` for one device.
    pub parallel: Option<Parallel>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: None,
            keep_quantised: None,
            linear: LinearPrecision::default(),
            kv: KvStorage::default(),
            tokenizer: None,
            hub: HubOptions::from_env(),
            parallel: None,
        }
    }
}

impl LoadOptions {
    fn dtype(&self) -> Result<DType> {
        check_dtype(self.dtype.unwrap_or(if self.device.is_cpu() { DType::F32 } else { DType::BF16 }))
    }

    fn keeps_quantised(&self) -> bool {
        self.keep_quantised.unwrap_or(self.device.is_cpu() && self.dtype.is_none())
    }
}

impl ModelSource {
    /// Loads weights, tokenizer and configuration. `progress` is called after each layer; downloads draw their own bars
    /// on stderr if it is a terminal.
    ///
    /// # Errors
    /// Any [`ModelError`]: missing, truncated or unsupported files, a hub that refuses or cannot be reached.
    pub fn load(&self, options: &LoadOptions, progress: Option<&mut Progress>) -> Result<LoadedModel> {
        let dtype = options.dtype()?;
        let parts = match self {
            Self::Embedded => Parts {
                config: DecoderConfig::from_json(s2o_needle_11m::CONFIG, EMBEDDED)?,
                vb: VarBuilder::from_buffered_safetensors(s2o_needle_11m::safetensors(), dtype, &options.device)?,
                quantised: Quantised::new(),
                files: None,
                tokenizer: match &options.tokenizer {
                    Some(path) => read_tokenizer(path)?,
                    None => Tokenizer::from_str(s2o_needle_11m::TOKENIZER).map_err(ModelError::tokenizer)?,
                },
                eos_ids: eos_ids(s2o_needle_11m::CONFIG, EMBEDDED)?,
            },
            Self::Directory(directory) => safetensors::open(directory, dtype, options)?,
            Self::Gguf(path) => gguf::open(path, dtype, options)?,
            Self::Hub { id, revision } => {
                let directory = fetch(id, revision, options)?;
                safetensors::open(&directory, dtype, options)?
            }
            Self::Synthetic(synthetic) => synthetic.open(dtype, &options.device)?,
        };
        let weights = Weights::new(parts.vb, &parts.quantised, options.linear).with_files(parts.files.as_ref());
        let decoder = Decoder::from_weights(&parts.config, &weights, options.kv, options.parallel.clone(), progress)?;
        let model = LoadedModel::new(self.name(), decoder, parts.tokenizer, parts.eos_ids)?;
        Ok(LoadedModel { is_synthetic: matches!(self, Self::Synthetic(_)), ..model })
    }

    /// Shape and constants of the model, without its weights. `None` for a model on the hub, which may not be here yet.
    ///
    /// # Errors
    /// As [`ModelSource::load`] for the configuration, which is all that is read.
    pub fn config(&self) -> Result<Option<DecoderConfig>> {
        match self {
            Self::Embedded => DecoderConfig::from_json(s2o_needle_11m::CONFIG, EMBEDDED).map(Some),
            Self::Directory(directory) => Ok(Some(safetensors::config(directory)?.0)),
            Self::Gguf(path) => gguf::config(path).map(Some),
            Self::Hub { .. } => Ok(None),
            Self::Synthetic(synthetic) => synthetic.shape.config().map(Some),
        }
    }

    /// Bytes that the weights of a GGUF file take if they are dequantised. `None` in all other cases, where the weights
    /// have the size of their files.
    ///
    /// # Errors
    /// As [`ModelSource::load`] for the file's header, which is all that is read.
    pub fn dequantised_bytes(&self, options: &LoadOptions) -> Result<Option<u64>> {
        match self {
            Self::Gguf(path) if !options.keeps_quantised() => gguf::dequantised_bytes(path, options.dtype()?).map(Some),
            _ => Ok(None),
        }
    }

    /// A short name for tables: the last part of the path or of the id.
    pub fn name(&self) -> String {
        let last = |path: &Path, whole: bool| {
            let part = if whole { path.file_name() } else { path.file_stem() };
            part.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
        };
        match self {
            Self::Embedded => EMBEDDED.to_owned(),
            Self::Directory(path) => last(path, true),
            Self::Gguf(path) => last(path, false),
            Self::Hub { id, .. } => last(Path::new(id), true),
            Self::Synthetic(synthetic) => synthetic.name(),
        }
    }
}

#[cfg(not(feature = "hub"))]
fn fetch(id: &str, _: &str, _: &LoadOptions) -> Result<PathBuf> {
    let feature = "loading from the hub in a build without the feature `hub`";
    Err(ModelError::unsupported(feature, "a directory, a .gguf file or `needle-11m`", id))
}

/// The parts of a model before the decoder is built.
struct Parts {
    config: DecoderConfig,
    vb: VarBuilder<'static>,
    /// Matrices that `vb` lacks.
    quantised: Quantised,
    /// The files of `vb`, for ranks that read parts of them.
    files: Option<MmapedSafetensors>,
    tokenizer: Tokenizer,
    eos_ids: Vec<u32>,
}

/// Reads a text file that must exist.
fn read_text(path: &Path, hint: &str) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| io_error(path, hint, error))
}

/// `NotFound` becomes a missing file with a hint, everything else keeps its reason.
fn io_error(path: &Path, hint: &str, source: std::io::Error) -> ModelError {
    match source.kind() {
        std::io::ErrorKind::NotFound => ModelError::MissingFile { path: path.to_owned(), hint: hint.to_owned() },
        _ => ModelError::Io { path: path.to_owned(), source },
    }
}

/// `eos_token_id` of a `config.json` or `generation_config.json`: a number, a list, or nothing.
fn eos_ids(json: &str, origin: &str) -> Result<Vec<u32>> {
    let value: serde_json::Value = serde_json::from_str(json).map_err(|e| ModelError::config(origin, e))?;
    let id = |value: &serde_json::Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| ModelError::config(origin, format!("eos_token_id holds {value}, expected a token id")))
    };
    match value.get("eos_token_id") {
        None | Some(serde_json::Value::Null) => Ok(Vec::new()),
        Some(serde_json::Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(single) => Ok(vec![id(single)?]),
    }
}
