//! The only error type of this crate. Every variant says what was expected and what was found.

use std::fmt;
use std::path::{Path, PathBuf};

use candle_core::Device;
use thiserror::Error;

use crate::device_memory::{DeviceMemory, is_out_of_memory};

/// An error while a model is found, loaded or run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The ranks that run a decoder together do not agree, or one was lost.
    #[error("{0}")]
    Ranks(#[from] s2o_comm::CommError),
    /// A model source string is none of the accepted forms.
    #[error(
        "`{got}` is not a model source: expected `needle-11m`, a directory, a file ending in .gguf, or a hub id \
         `org/name[@revision]`"
    )]
    InvalidSource {
        /// The string that was given.
        got: String,
    },
    /// A model source string is a file in a model directory, such as `model.safetensors`.
    #[error("`{got}` is a file: expected the directory of a model, such as `{directory}`, or a file ending in .gguf")]
    FileOfModel {
        /// The string that was given.
        got: String,
        /// The directory.
        directory: String,
    },
    /// A synthetic model's shape is none of the accepted forms.
    #[error(
        "`{got}` is no shape of a synthetic model: expected `llama-3.1-8b`, `llama-3.1-70b`, `qwen3-8b`, or a config.json \
         whose path ends in .json"
    )]
    InvalidShape {
        /// The string that was given.
        got: String,
    },
    /// A file that the model needs does not exist.
    #[error("{} is missing{}", path.display(), hint)]
    MissingFile {
        /// Where the file was expected.
        path: PathBuf,
        /// Advice, starting with `: `, or empty.
        hint: String,
    },
    /// Reading a file failed.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Writing a file failed.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A configuration (`config.json`, GGUF metadata, ...) cannot be understood or contradicts itself.
    #[error("invalid configuration in {origin}: {reason}")]
    InvalidConfig {
        /// File or metadata key.
        origin: String,
        /// The problem.
        reason: String,
    },
    /// The decoder does not support the architecture of the model.
    #[error("architecture `{got}` is not supported: expected {expected}")]
    UnsupportedArchitecture {
        /// The accepted architectures.
        expected: &'static str,
        /// The architecture found.
        got: String,
    },
    /// The architecture is supported, but the model has a feature that this decoder would compute wrongly.
    #[error("{feature} is not supported: expected {expected}, got {got}")]
    UnsupportedFeature {
        /// The configuration entry.
        feature: &'static str,
        /// Accepted values.
        expected: &'static str,
        /// The value found.
        got: String,
    },
    /// Linear layers in int8 were asked for where they cannot be computed.
    #[error(
        "linear layers in int8: expected bf16 or f16 on {expected}, got {got}; without int8 they have the dtype of the weights"
    )]
    Int8Linear {
        /// The devices that can.
        expected: &'static str,
        /// Dtype and device.
        got: String,
    },
    /// A weight file is truncated or is not a weight file.
    #[error("{} is not a valid weight file: {reason}", path.display())]
    InvalidWeights {
        /// The file.
        path: PathBuf,
        /// The reader's error.
        reason: String,
    },
    /// The prompt's logits are NaN or infinite.
    #[error(
        "expected finite logits, got {got}: {}; look for such values in the weights, and use bf16 or f32 if the model \
         overflows in f16",
        first_layer(*.layer)
    )]
    NotFinite {
        /// Sum of the logits.
        got: f32,
        /// The first layer whose keys or values are not finite; `None` if those of all layers are.
        layer: Option<usize>,
    },
    /// The weights lack a tensor that the configuration requires.
    #[error("tensor `{name}` is missing from the weights")]
    MissingTensor {
        /// Its Hugging Face or GGUF name.
        name: String,
    },
    /// A weight tensor does not have the shape that the configuration requires.
    #[error("tensor `{name}` has shape {got:?}, expected {expected:?}")]
    WrongShape {
        /// Its name.
        name: String,
        /// The shape that follows from the configuration.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// The tokenizer cannot be built or cannot encode or decode.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// The problem.
        reason: String,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// An invalid input, such as a prompt tensor of a wrong rank or a batch that is not the cache's.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The checked property.
        what: &'static str,
        /// The expected value.
        expected: String,
        /// The value found.
        got: String,
    },
    /// A prefill chunk of zero tokens.
    #[error("a prefill chunk must hold at least one token, got 0")]
    EmptyChunk,
    /// More positions are needed than the model has.
    #[error("the model has {expected} positions, but {got} are needed")]
    ContextTooLong {
        /// The model's maximum.
        expected: usize,
        /// Positions needed.
        got: usize,
    },
    /// More positions are needed than the KV cache has.
    #[error("the KV cache holds {expected} positions, but {got} are needed")]
    CacheFull {
        /// Its capacity.
        expected: usize,
        /// Positions needed.
        got: usize,
    },
    /// The GPU does not exist, or its driver is missing or does not work.
    #[error("GPU {ordinal} cannot be used: {reason}; {way_out}")]
    NoGpu {
        /// Its number.
        ordinal: usize,
        /// The driver's error.
        reason: String,
        /// Advice to the user.
        way_out: &'static str,
    },
    /// The host does not have enough free memory.
    #[error("{what} needs about {} MB, but the host has {} MB free: {way_out}", asked / 1_000_000, free / 1_000_000)]
    OutOfHostMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// Number of bytes needed.
        asked: u64,
        /// Bytes free.
        free: u64,
        /// Advice.
        way_out: &'static str,
    },
    /// A GPU does not have enough free memory.
    #[error(
        "{what} needs about {} MB, but the GPU has {} MB free of {} MB: {way_out}",
        asked / 1_000_000, free / 1_000_000, total / 1_000_000
    )]
    OutOfMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// Approximate number of bytes needed.
        asked: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that the GPU has.
        total: u64,
        /// Advice to the user.
        way_out: &'static str,
    },
    /// A token id outside the vocabulary.
    #[error("token id {got} is outside the vocabulary of {expected} entries")]
    TokenOutOfRange {
        /// Vocabulary size.
        expected: usize,
        /// The id.
        got: u32,
    },
    /// The hub refuses to hand out the repository (401 or 403).
    #[error(
        "{} is gated, private or does not exist (HTTP {status}): accept the licence at {}/{} and set HF_TOKEN or run \
         `hf auth login`{}",
        at.id, at.endpoint, at.id, no_directory(at)
    )]
    Gated {
        /// The requested file.
        at: Box<HubFile>,
        /// 401 or 403.
        status: u16,
    },
    /// The hub has no such file, revision or repository (404).
    #[error("{at} does not exist (HTTP 404): check the id and the revision{}", no_directory(at))]
    HubFileNotFound {
        /// The requested file.
        at: Box<HubFile>,
    },
    /// The hub cannot be reached and the file is not in the local cache.
    #[error(
        "cannot reach {at}, and it is not in the cache {}: {reason}. Connect once, or give a local directory or .gguf \
         file{}",
        cache.display(), no_directory(at)
    )]
    Offline {
        /// The requested file.
        at: Box<HubFile>,
        /// The cache that was searched.
        cache: PathBuf,
        /// The network's error.
        reason: String,
    },
    /// Any other failure of a request to the hub.
    #[error("cannot fetch {at}: {reason}")]
    Hub {
        /// The requested file.
        at: Box<HubFile>,
        /// The failure.
        reason: String,
    },
    /// An error of Candle or of the attention method.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A file on the hub, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// The repository, `org/name`.
    pub id: String,
    /// The file in it.
    pub file: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// The hub's address.
    pub endpoint: String,
}

impl fmt::Display for HubFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} at revision {} on {}", self.file, self.id, self.revision, self.endpoint)
    }
}

/// `Result` with [`ModelError`].
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

impl ModelError {
    /// Converts a Candle error from reading tensor `name` to its typed form.
    pub(crate) fn from_tensor_read(name: &str, error: candle_core::Error) -> Self {
        match innermost(&error) {
            candle_core::Error::CannotFindTensor { path } => Self::MissingTensor { name: path.clone() },
            candle_core::Error::UnexpectedShape { expected, got, .. } => {
                Self::WrongShape { name: name.to_owned(), expected: expected.dims().to_vec(), got: got.dims().to_vec() }
            }
            _ => Self::Candle(error),
        }
    }

    pub(crate) fn config(origin: impl Into<String>, reason: impl ToString) -> Self {
        Self::InvalidConfig { origin: origin.into(), reason: reason.to_string() }
    }

    pub(crate) fn write(path: &Path, reason: impl ToString) -> Self {
        Self::Write { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn input(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::WrongInput { what, expected: expected.to_string(), got: got.to_string() }
    }

    pub(crate) fn unsupported(feature: &'static str, expected: &'static str, got: impl ToString) -> Self {
        Self::UnsupportedFeature { feature, expected, got: got.to_string() }
    }

    pub(crate) fn tokenizer(reason: impl ToString) -> Self {
        Self::Tokenizer { reason: reason.to_string() }
    }
}

/// Memory that is about to be allocated, for the error if there is too little.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// Its purpose.
    pub(crate) what: &'static str,
    /// Approximate number of bytes.
    pub(crate) bytes: u64,
    /// Advice if there is too little memory.
    pub(crate) way_out: &'static str,
}

impl Need {
    pub(crate) fn unmet(self, memory: DeviceMemory) -> ModelError {
        let DeviceMemory { free, total } = memory;
        ModelError::OutOfMemory { what: self.what, asked: self.bytes, free, total, way_out: self.way_out }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn unmet_on_host(self) -> ModelError {
        let free = crate::host_memory::available().unwrap_or(0);
        ModelError::OutOfHostMemory { what: self.what, asked: self.bytes, free, way_out: self.way_out }
    }

    /// The error of a failed allocation of pinned memory: the driver does not say that the host lacks it, not the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_host(self, error: candle_core::Error) -> ModelError {
        if is_out_of_memory(&error) { self.unmet_on_host() } else { error.into() }
    }

    /// Converts the error of a device that ran out of memory to its typed form.
    pub(crate) fn check<T>(self, result: Result<T>, device: &Device) -> Result<T> {
        match result {
            Err(ModelError::Candle(error)) if is_out_of_memory(&error) => {
                // The failed work holds memory until it has ended. If the wait fails too, the first error counts.
                let _ = device.synchronize();
                match DeviceMemory::of(device) {
                    Ok(Some(memory)) => Err(self.unmet(memory)),
                    _ => Err(ModelError::Candle(error)),
                }
            }
            other => other,
        }
    }
}

/// The error below Candle's context and backtrace layers.
fn innermost(error: &candle_core::Error) -> &candle_core::Error {
    use candle_core::Error as E;
    match error {
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } | E::Context { inner, .. } => innermost(inner),
        other => other,
    }
}

/// Says that an id, which may be a mistyped path, is no directory.
fn no_directory(at: &HubFile) -> String {
    match Path::new(&at.id).is_dir() {
        true => String::new(),
        false => format!("; there is no directory {} here", at.id),
    }
}

/// Where values that are not finite begin.
fn first_layer(layer: Option<usize>) -> String {
    match layer {
        Some(layer) => format!("the keys and values of layer {layer} are the first that are not finite"),
        None => "all keys and values are finite, so it begins after the last layer's attention".to_owned(),
    }
}
