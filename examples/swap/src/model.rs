//! Stock models of candle-transformers, selected by their config.json.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen3};

/// A model and its state between calls.
pub(crate) enum Model {
    Llama { model: llama::Llama, config: llama::Config, cache: llama::Cache, dtype: DType, device: Device },
    Qwen3 { model: qwen3::ModelForCausalLM, config: qwen3::Config },
}

impl Model {
    pub(crate) fn load(dir: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let json: serde_json::Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let weights = weights(dir, dtype, device)?;
        match json["model_type"].as_str() {
            Some("llama") => {
                let config = serde_json::from_str::<llama::LlamaConfig>(&text)?.into_config(true);
                let cache = llama::Cache::new(true, dtype, &config, device)?;
                let model = llama::Llama::load(weights, &config)?;
                Ok(Self::Llama { model, config, cache, dtype, device: device.clone() })
            }
            Some("qwen3") => {
                let config: qwen3::Config = serde_json::from_str(&text)?;
                Ok(Self::Qwen3 { model: qwen3::ModelForCausalLM::new(&config, weights)?, config })
            }
            got => bail!("{}: model_type: expected llama or qwen3, got {got:?}", path.display()),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Llama { .. } => "candle_transformers::models::llama",
            Self::Qwen3 { .. } => "candle_transformers::models::qwen3",
        }
    }

    pub(crate) fn max_positions(&self) -> usize {
        match self {
            Self::Llama { config, .. } => config.max_position_embeddings,
            Self::Qwen3 { config, .. } => config.max_position_embeddings,
        }
    }

    /// Clears keys and values.
    pub(crate) fn clear(&mut self) -> Result<()> {
        match self {
            Self::Llama { config, cache, dtype, device, .. } => {
                *cache = llama::Cache::new(true, *dtype, config, device)?;
            }
            Self::Qwen3 { model, .. } => model.clear_kv_cache(),
        }
        Ok(())
    }

    /// Logits of the last token, in f32.
    pub(crate) fn forward(&mut self, input: &Tensor, position: usize) -> Result<Tensor> {
        let logits = match self {
            Self::Llama { model, cache, .. } => model.forward(input, position, cache)?,
            Self::Qwen3 { model, .. } => model.forward(input, position)?,
        };
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?)
    }
}

fn weights(dir: &Path, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let mut tensors = std::collections::HashMap::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            tensors.extend(candle_core::safetensors::load(&path, device).with_context(|| path.display().to_string())?);
        }
    }
    ensure!(!tensors.is_empty(), "{}: expected safetensors files, got none", dir.display());
    Ok(VarBuilder::from_tensors(tensors, dtype, device))
}
