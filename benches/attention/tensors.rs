//! Queries, keys and values of a trained model on a long prompt.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use s2o_eval::capture::{LayerTensors, capture};
use s2o_eval::tasks::passkey;
use s2o_models::{Chunk, LoadOptions, ModelSource};

/// Post-RoPE q, k, v of the layers of needle-7m on a passkey prompt.
pub fn captured(tokens: usize, layers: &[usize], device: &Device) -> Result<Vec<LayerTensors>> {
    let options = LoadOptions { device: device.clone(), ..LoadOptions::default() };
    // The records of this benchmark are of this model.
    let directory = tempfile::tempdir()?;
    s2o_needle_7m::write(directory.path())?;
    let model = ModelSource::Directory(directory.path().to_owned()).load(&options, None)?;
    let prompt = passkey::build(&model.tokenizer, tokens, 0.5, 0)?;
    let captured = capture(&model, &prompt.tokens, Chunk::Whole, layers, &mut |_, _| {})?;
    // Copies, because keys and values are views of the cache.
    let copied = captured.into_iter().map(|layer| {
        let copy = |t: &Tensor| t.contiguous()?.copy();
        Ok(LayerTensors { q: copy(&layer.q)?, k: copy(&layer.k)?, v: copy(&layer.v)?, ..layer })
    });
    copied.collect()
}

/// All layers stacked as the heads of one call: (1, tokens, 24, 128) queries, 12 KV heads.
pub fn stacked(tokens: usize, device: &Device) -> Result<LayerTensors> {
    let layers = captured(tokens, &[0, 1, 2, 3, 4, 5], device)?;
    let softmax_scale = layers[0].softmax_scale;
    let is_same = layers.iter().all(|layer| layer.softmax_scale == softmax_scale);
    ensure!(is_same, "the layers differ in softmax scale");
    let join = |of: fn(&LayerTensors) -> &Tensor| -> Result<Tensor> {
        Ok(Tensor::cat(&layers.iter().map(of).collect::<Vec<_>>(), 2)?.contiguous()?)
    };
    let (q, k, v) = (join(|layer| &layer.q)?, join(|layer| &layer.k)?, join(|layer| &layer.v)?);
    Ok(LayerTensors { layer: 0, q, k, v, softmax_scale })
}
