//! Queries, keys and values of a trained model on a long prompt.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use s2o_eval::capture::{LayerTensors, capture};
use s2o_eval::tasks::passkey;
use s2o_models::{Chunk, Decoder, DecoderConfig, LoadedModel};

/// Post-RoPE q, k, v of the layers of needle-7m on a passkey prompt.
pub fn captured(tokens: usize, layers: &[usize], device: &Device) -> Result<Vec<LayerTensors>> {
    let model = needle_7m(device)?;
    let prompt = passkey::build(&model.tokenizer, tokens, 0.5, 0)?;
    let captured = capture(&model, &prompt.tokens, Chunk::Whole, layers, &mut |_, _| {})?;
    // Copies, because keys and values are views of the cache.
    let copied = captured.into_iter().map(|layer| {
        let copy = |t: &Tensor| t.contiguous()?.copy();
        Ok(LayerTensors { q: copy(&layer.q)?, k: copy(&layer.k)?, v: copy(&layer.v)?, ..layer })
    });
    copied.collect()
}

/// The model of this benchmark's records.
fn needle_7m(device: &Device) -> Result<LoadedModel> {
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let config = DecoderConfig::from_json(s2o_needle_7m::CONFIG, "needle-7m")?;
    let vb = VarBuilder::from_buffered_safetensors(s2o_needle_7m::safetensors(), dtype, device)?;
    let tokenizer = s2o_needle_11m::TOKENIZER.parse().map_err(anyhow::Error::from_boxed)?;
    // Nothing is generated, so no token ends a generation.
    Ok(LoadedModel::new("needle-7m".to_owned(), Decoder::load(&config, &vb, None)?, tokenizer, Vec::new())?)
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
