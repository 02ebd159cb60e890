//! Queries, keys and values of a trained model on a long prompt.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use s2o_eval::capture::{LayerTensors, capture};
use s2o_eval::tasks::passkey;
use s2o_models::{Chunk, LoadOptions, ModelSource};

/// Post-RoPE q, k, v of the layers of needle-7m on a passkey prompt, and the softmax scale.
pub fn captured(tokens: usize, layers: &[usize], device: &Device) -> Result<Vec<(usize, [Tensor; 3], f32)>> {
    let options = LoadOptions { device: device.clone(), ..LoadOptions::default() };
    let model = ModelSource::Needle7m.load(&options, None)?;
    let prompt = passkey::build(&model.tokenizer, tokens, 0.5, 0)?;
    let captured = capture(&model, &prompt.tokens, Chunk::Whole, layers, &mut |_, _| {})?;
    // Copies, because keys and values are views of the cache.
    let copied = captured.into_iter().map(|LayerTensors { layer, q, k, v, softmax_scale }| {
        let copy = |t: &Tensor| t.contiguous()?.copy();
        Ok((layer, [copy(&q)?, copy(&k)?, copy(&v)?], softmax_scale))
    });
    copied.collect()
}

/// All layers stacked as the heads of one call: (1, tokens, 24, 128) queries, 12 KV heads.
pub fn stacked(tokens: usize, device: &Device) -> Result<([Tensor; 3], f32)> {
    let layers = captured(tokens, &[0, 1, 2, 3, 4, 5], device)?;
    let scale = layers[0].2;
    ensure!(layers.iter().all(|layer| layer.2 == scale), "the layers differ in softmax scale");
    let join = |which: usize| -> Result<Tensor> {
        let parts: Vec<&Tensor> = layers.iter().map(|(_, tensors, _)| &tensors[which]).collect();
        Ok(Tensor::cat(&parts, 2)?.contiguous()?)
    };
    Ok(([join(0)?, join(1)?, join(2)?], scale))
}
