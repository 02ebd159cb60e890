//! Queries, keys and values to work on: from a file or from a model's prefill.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use clap::Args;
use s2o_eval::capture::{LayerTensors, TensorFile};
use s2o_models::LoadedModel;

use crate::model_flags::{self, ModelFlags};
use crate::progress;
use crate::prompt_flags::PromptFlags;

/// Flags for the source of the tensors.
#[derive(Debug, Clone, Args)]
pub struct TensorFlags {
    /// Safetensors file with q, k, v, each (batch, length, heads, head_dim) in f32, f16 or bf16, or with layer.N.q and
    /// so on for several layers; an optional tensor softmax_scale holds one number
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "model", "revision", "tokenizer_file", "dtype", "chunk", "prompt", "prompt_file", "passkey", "context", "depth",
        "seed", "synthetic", "synthetic_weights", "synthetic_focus", "tokens",
    ])]
    tensors: Option<PathBuf>,
    /// Layers to use, such as `0,5` [default: all of a file; the first, middle and last of a model]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    layers: Vec<usize>,
    #[command(flatten)]
    pub model: ModelFlags,
    #[command(flatten)]
    pub prompt: PromptFlags,
}

/// The layers, and a description of their origin.
pub struct Source {
    pub layers: Box<dyn Iterator<Item = Result<LayerTensors>>>,
    pub count: usize,
    pub description: String,
    pub device: Device,
}

impl TensorFlags {
    /// Opens the file, or loads the model, calls `check` and prefills the prompt.
    pub fn open(&self, check: impl FnOnce(&LoadedModel) -> Result<()>) -> Result<Source> {
        if let Some(path) = &self.tensors {
            let file = TensorFile::open(path)?;
            let layers = file.choose(&self.layers).context("--layers")?;
            let device = self.model.device()?;
            return Ok(Source {
                count: layers.len(),
                description: format!("tensors {}", path.display()),
                device: device.clone(),
                layers: Box::new(layers.into_iter().map(move |layer| {
                    let tensors = file.load(layer, &device)?;
                    warn_of_another_order(&tensors);
                    Ok(tensors)
                })),
            });
        }
        let prompt = self.prompt.read(&self.model)?;
        let model = self.model.load()?;
        check(&model)?;
        let last = model.config().num_layers - 1;
        if let Some(got) = self.layers.iter().find(|layer| **layer > last) {
            bail!("--layers: expected layers 0 to {last}, got {got}");
        }
        let prompt = prompt.encode(&model)?;
        let layers = self.model.capture("capturing", &model, &prompt.tokens, &self.layers)?;
        Ok(Source {
            count: layers.len(),
            description: format!("model   {}\nprompt  {}", model_flags::describe(&model), prompt.description),
            device: model.decoder.device().clone(),
            layers: Box::new(layers.into_iter().map(Ok)),
        })
    }
}

/// Warns of more heads than keys: tensors in (batch, heads, length, head_dim) with as many KV heads as heads have valid
/// sizes and would be taken for a short prompt. Sizes that do not match are left to attention, which refuses them.
fn warn_of_another_order(tensors: &LayerTensors) {
    let Ok(shape) = tensors.shape() else { return };
    let (heads, len) = (shape.num_heads(), shape.k_len());
    if heads > len {
        progress::say(&format!(
            "warning: layer {} has {heads} heads but {len} tokens; the order must be (batch, length, heads, head_dim): \
             tensors in (batch, heads, length, head_dim) need transpose(1, 2)",
            tensors.layer
        ));
    }
}
