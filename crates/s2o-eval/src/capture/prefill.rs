//! Capture of q, k, v in a model's prefill.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::Tensor;
use candle_s2o::{Attention, Dense, PrefillCall};
use s2o_models::{Chunk, LoadedModel, PrefillOptions};

use super::LayerTensors;
use crate::error::{EvalError, Result};

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

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
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
/// [`EvalError::NoSuchLayer`] for a layer that the model lacks; an error of the model if it refuses the prompt.
pub fn capture(
    model: &LoadedModel,
    prompt: &[u32],
    chunk: Chunk,
    layers: &[usize],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<LayerTensors>> {
    let num_layers = model.config().num_layers;
    if let Some(&got) = layers.iter().find(|layer| **layer >= num_layers) {
        return Err(EvalError::NoSuchLayer { expected: format!("layers 0 to {}", num_layers - 1), got });
    }
    let layers = if layers.is_empty() { vec![0, num_layers / 2, num_layers - 1] } else { layers.to_vec() };
    let recorder = Recorder { layers, parts: Mutex::default() };

    let tokens = model.prompt(prompt)?;
    let mut cache = model.decoder.new_cache(1, prompt.len())?;
    let options = PrefillOptions::new().chunk(chunk).num_logits(0).on_progress(progress);
    model.decoder.prefill(&tokens, &mut cache, &recorder, options)?;

    let parts = recorder.parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    let captured = parts.into_iter().filter_map(|(layer, parts)| {
        let (k, v, softmax_scale) = parts.keys_values_scale?;
        Some(Tensor::cat(&parts.queries, 1).map(|q| LayerTensors { layer, q, k, v, softmax_scale }))
    });
    Ok(captured.collect::<candle_core::Result<_>>()?)
}
