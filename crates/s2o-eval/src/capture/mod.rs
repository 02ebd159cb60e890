//! Queries, keys and values to run attention methods on: captured in a model's prefill, or read from a file.

mod file;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Tensor};
use candle_s2o::{Attention, AttnShape, Dense, PrefillCall};
use s2o_models::{Chunk, LoadedModel, PrefillOptions};

use crate::error::EvalError;
use crate::method::shape_of;

pub use file::{TensorFile, save_layers, save_tensors, tensor_name};

/// The operands of one attention call.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// The decoder layer that they come from.
    pub layer: usize,
    /// (batch, q_len, num_heads, head_dim)
    pub q: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub v: Tensor,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
}

impl LayerTensors {
    /// The parameters of the call. The prompt has as many tokens as `k`.
    ///
    /// # Errors
    /// If `k` has no length dimension.
    pub fn call(&self) -> Result<PrefillCall> {
        Ok(PrefillCall { layer: self.layer, softmax_scale: self.softmax_scale, prompt_len: self.k.dim(1)? })
    }

    /// The checked sizes.
    ///
    /// # Errors
    /// If the shapes of the tensors do not match.
    pub fn shape(&self) -> Result<AttnShape> {
        shape_of(&self.q, &self.k, &self.v)
    }
}

/// Dense attention that records the tensors of some layers.
#[derive(Debug)]
struct Recorder {
    layers: Vec<usize>,
    parts: Mutex<BTreeMap<usize, Parts>>,
}

/// The queries of each chunk; keys, values and scale of the last chunk's call.
#[derive(Debug, Default)]
struct Parts {
    queries: Vec<Tensor>,
    keys_values_scale: Option<(Tensor, Tensor, f32)>,
}

impl Attention for Recorder {
    fn name(&self) -> &str {
        Dense.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if self.layers.contains(&call.layer) {
            let mut all = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            let parts = all.entry(call.layer).or_default();
            parts.queries.push(q.clone());
            if k.dim(1)? == call.prompt_len {
                // Views of the cache, which is not used after the prefill.
                parts.keys_values_scale = Some((k.clone(), v.clone(), call.softmax_scale));
            }
        }
        Dense.prefill(call, q, k, v)
    }
}

/// Prefills `prompt` densely and returns q, k, v of `layers`, or of the first, middle and last layer if `layers` is
/// empty. `progress` gets the number of tokens done and of all tokens.
///
/// # Errors
/// [`EvalError::WrongInput`] for a layer that the model lacks; an error of the model if it refuses the prompt or if its
/// logits are not finite.
pub fn capture(
    model: &LoadedModel,
    prompt: &[u32],
    chunk: Chunk,
    layers: &[usize],
    progress: &mut dyn FnMut(usize, usize),
) -> crate::Result<Vec<LayerTensors>> {
    let num_layers = model.config().num_layers;
    if let Some(&got) = layers.iter().find(|layer| **layer >= num_layers) {
        return Err(EvalError::wrong("layers", format!("layers 0 to {}", num_layers - 1), got));
    }
    let layers = if layers.is_empty() { vec![0, num_layers / 2, num_layers - 1] } else { layers.to_vec() };
    let recorder = Recorder { layers, parts: Mutex::default() };

    let tokens = model.prompt(prompt)?;
    let mut cache = model.decoder.new_cache(1, prompt.len())?;
    let options = PrefillOptions::new().chunk(chunk).on_progress(progress);
    let logits = model.decoder.prefill(&tokens, &mut cache, &recorder, options)?.last_logits()?;
    cache.check_logits(&logits)?;

    let parts = recorder.parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    let captured = parts.into_iter().filter_map(|(layer, parts)| {
        let (k, v, softmax_scale) = parts.keys_values_scale?;
        Some(Tensor::cat(&parts.queries, 1).map(|q| LayerTensors { layer, q, k, v, softmax_scale }))
    });
    Ok(captured.collect::<Result<_>>()?)
}
