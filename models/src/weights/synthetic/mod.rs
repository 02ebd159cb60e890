//! Synthetic weights of any shape from a seed, for tests and for timing without a model's real weights.
//!
//! Time and memory of a model depend only on its shape, with one exception: the share of attention that a sparse method
//! computes depends on where the model attends. [`Profile::Calibrated`] weights therefore attend as measured on trained
//! models (sink, vertical stripes, locality; `docs/synthetic.md`). The output of such a model has no meaning, and its
//! name says that it is synthetic.
//!
//! The same weights go into this crate's decoder and into Candle's own models:
//!
//! ```
//! use candle_core::{DType, Device};
//! use s2o_models::{Decoder, DecoderConfig};
//! use s2o_models::weights::synthetic::{self, Profile};
//!
//! # let json = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
//! #   "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
//! #   "max_position_embeddings": 256}"#;
//! // For instance `Shape::Llama31_8b.json()`.
//! let config = DecoderConfig::from_json(json, "doc")?;
//! let vb = synthetic::var_builder(&config, Profile::default(), 0, DType::F32, &Device::Cpu)?;
//! let decoder = Decoder::load(&config, &vb, None)?;
//! let prompt = synthetic::prompt(config.vocab_size, 200, 0);
//! # assert_eq!((prompt.len(), decoder.config().num_layers), (200, 1));
//! # Ok::<(), s2o_models::ModelError>(())
//! ```

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use super::{Parts, read_text};
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::layers::Quantised;
use crate::random::SplitMix64;

mod anatomy;
mod generator;
mod save;

use anatomy::Anatomy;
use generator::Generator;

/// The seed of the weights in the program and in the benchmarks, so that both have the same model.
pub const SEED: u64 = 299_792_458;

/// The first token of every synthetic prompt; calibrated weights have their sink there.
pub const FIRST_TOKEN: u32 = 0;

/// The attention that the weights cause.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Profile {
    /// Sinks, vertical stripes and locality as measured on trained models.
    Calibrated {
        /// Factor on the scores of all three, 0 to [`Self::MAX_FOCUS`]: 1 is calibrated, 0 leaves only noise, larger is
        /// more concentrated and sparser.
        focus: f64,
    },
    /// Independent normal weights: attention is nearly uniform, unlike in any trained model.
    Random,
}

impl Profile {
    /// The largest focus, beyond which attention is one-hot.
    pub const MAX_FOCUS: f64 = 4.0;

    fn check(self, config: &DecoderConfig) -> Result<()> {
        let Self::Calibrated { focus } = self else { return Ok(()) };
        if !(0.0..=Self::MAX_FOCUS).contains(&focus) {
            let expected = format!("a number from 0 to {}", Self::MAX_FOCUS);
            return Err(ModelError::input("focus of calibrated weights", expected, focus));
        }
        for (name, got) in [("head_dim", config.head_dim), ("hidden_size", config.hidden_size)] {
            if got < Anatomy::MIN_HEAD_DIM {
                let expected = Anatomy::MIN_HEAD_DIM;
                let reason = format!("{name} is {got}, expected at least {expected} for calibrated weights");
                return Err(ModelError::config("the synthetic shape", reason));
            }
        }
        Ok(())
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::Calibrated { focus: 1.0 }
    }
}

/// The shape of a synthetic model. Parses from `llama-3.1-8b`, `llama-3.1-70b`, `qwen3-8b`, or the path of a
/// `config.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// Llama 3.1 8B.
    Llama31_8b,
    /// Llama 3.1 70B, which takes several GPUs.
    Llama31_70b,
    /// Qwen3 8B with YaRN for 131,072 positions, as its model card recommends for long contexts.
    Qwen3_8b,
    /// Any `config.json` that the decoder takes.
    Config(PathBuf),
}

impl FromStr for Shape {
    type Err = ModelError;

    fn from_str(shape: &str) -> Result<Self> {
        let presets = [Self::Llama31_8b, Self::Llama31_70b, Self::Qwen3_8b];
        if let Some(preset) = presets.into_iter().find(|preset| preset.origin() == shape) {
            return Ok(preset);
        }
        match shape.ends_with(".json") {
            true => Ok(Self::Config(PathBuf::from(shape))),
            false => Err(ModelError::InvalidShape { got: shape.to_owned() }),
        }
    }
}

impl Shape {
    /// The `config.json`, which Candle's own models can also read.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`] and [`ModelError::Io`] for a [`Self::Config`].
    pub fn json(&self) -> Result<Cow<'static, str>> {
        Ok(match self {
            Self::Llama31_8b => Cow::Borrowed(include_str!("../../../presets/llama-3.1-8b.json")),
            Self::Llama31_70b => Cow::Borrowed(include_str!("../../../presets/llama-3.1-70b.json")),
            Self::Qwen3_8b => Cow::Borrowed(include_str!("../../../presets/qwen3-8b.json")),
            Self::Config(path) => Cow::Owned(read_text(path, ": a synthetic model takes its shape from it")?),
        })
    }

    /// Shape and constants.
    ///
    /// # Errors
    /// As [`Self::json`] and [`DecoderConfig::from_json`].
    pub fn config(&self) -> Result<DecoderConfig> {
        DecoderConfig::from_json(&self.json()?, &self.origin())
    }

    /// The name from which it parses.
    fn origin(&self) -> Cow<'_, str> {
        match self {
            Self::Llama31_8b => "llama-3.1-8b".into(),
            Self::Llama31_70b => "llama-3.1-70b".into(),
            Self::Qwen3_8b => "qwen3-8b".into(),
            Self::Config(path) => path.to_string_lossy(),
        }
    }
}

/// A synthetic model: its shape, the profile of its weights, and their seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Synthetic {
    /// Sizes and constants.
    pub shape: Shape,
    /// The attention that its weights cause.
    pub profile: Profile,
    /// The same seed gives the same weights on the same kind of device.
    pub seed: u64,
}

impl Synthetic {
    /// A short name that says what it is, such as `synthetic-llama-3.1-8b-calibrated`.
    pub fn name(&self) -> String {
        let shape = match &self.shape {
            // Every model's file has the same name; its directory tells them apart.
            Shape::Config(path) => match path.parent().and_then(Path::file_name) {
                Some(directory) if path.ends_with("config.json") => directory.to_string_lossy().into_owned(),
                _ => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            },
            preset => preset.origin().into_owned(),
        };
        match self.profile {
            Profile::Calibrated { focus: 1.0 } => format!("synthetic-{shape}-calibrated"),
            Profile::Calibrated { focus } => format!("synthetic-{shape}-focus-{focus}"),
            Profile::Random => format!("synthetic-{shape}-random"),
        }
    }

    pub(super) fn open(&self, dtype: DType, device: &Device) -> Result<Parts> {
        let config = self.shape.config()?;
        let vb = var_builder(&config, self.profile, self.seed, dtype, device)?;
        let tokenizer = tokenizer(config.vocab_size)?;
        Ok(Parts { config, vb, quantised: Quantised::new(), files: None, tokenizer, eos_ids: Vec::new() })
    }
}

/// Weights for every tensor of `config` under their Hugging Face names and in their layout, of `dtype` (f32, bf16 or
/// f16) and on `device`. Each is made there on request (in f32, then rounded), so loading takes no host memory and at
/// most one tensor beyond the model. Two requests give equal tensors in separate memory.
///
/// The same seed gives the same weights on the same kind of device; a GPU's generator is set for each tensor
/// ([`Device::set_seed`]) and differs from the CPU's.
///
/// # Errors
/// [`ModelError::WrongInput`] for a focus outside 0 to [`Profile::MAX_FOCUS`], [`ModelError::InvalidConfig`] for a
/// shape too small to calibrate.
pub fn var_builder(
    config: &DecoderConfig,
    profile: Profile,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    profile.check(config)?;
    Ok(VarBuilder::from_backend(Box::new(Generator::new(config, profile, seed)), dtype, device.clone()))
}

/// `len` token ids: [`FIRST_TOKEN`], then random ids of the vocabulary. Every token is text; no end token exists.
pub fn prompt(vocab_size: usize, len: usize, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    let others = vocab_size.saturating_sub(1) as u64;
    let ids = std::iter::repeat_with(|| if others == 0 { FIRST_TOKEN } else { 1 + random.below(others) as u32 });
    std::iter::once(FIRST_TOKEN).chain(ids).take(len).collect()
}

/// A text of a synthetic model consists of the numbers of its tokens: `0 17 4711`.
fn tokenizer(vocab_size: usize) -> Result<Tokenizer> {
    let vocab = (0..vocab_size as u32).map(|id| (id.to_string(), id)).collect();
    // The unknown token is not in the vocabulary, so that a word fails instead of silently becoming a number.
    let model = WordLevel::builder().vocab(vocab).unk_token("no number".to_owned());
    let mut tokenizer = Tokenizer::new(model.build().map_err(ModelError::tokenizer)?);
    tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
    let first = FIRST_TOKEN.to_string();
    let frame = TemplateProcessing::builder()
        .try_single(format!("{first} $A"))
        .map_err(ModelError::tokenizer)?
        .special_tokens(vec![(first.clone(), FIRST_TOKEN)])
        .build()
        .map_err(ModelError::tokenizer)?;
    tokenizer.with_post_processor(Some(frame));
    tokenizer.add_special_tokens([AddedToken::from(first, true)]).map_err(ModelError::tokenizer)?;
    Ok(tokenizer)
}

/// Random f32 weights under Hugging Face names for every tensor of `config`, the same on every machine for a seed.
///
/// Matrices have standard deviation `1 / sqrt(fan_in)`, so that activations keep their size through the layers; norms
/// are near 1 and biases near 0.
///
/// # Errors
/// Candle's error if memory runs out.
pub fn weights(config: &DecoderConfig, seed: u64, device: &Device) -> Result<HashMap<String, Tensor>> {
    let mut random = SplitMix64::new(seed);
    config
        .tensor_shapes()
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product();
            let (mean, deviation) = match (name.ends_with("norm.weight"), shape.as_slice()) {
                (true, _) => (1.0, 0.1),
                (false, [_]) => (0.0, 0.02),
                (false, [.., fan_in]) => (0.0, 1.0 / (*fan_in as f32).sqrt()),
                (false, []) => (0.0, 1.0),
            };
            let values: Vec<f32> = (0..count).map(|_| mean + deviation * random.normal()).collect();
            Ok((name, Tensor::from_vec(values, shape, device)?.to_dtype(DType::F32)?))
        })
        .collect()
}
