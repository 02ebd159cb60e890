//! Queries, keys and values of a trained model on a long prompt.

use std::sync::Mutex;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_s2o::{Attention, PrefillCall};
use s2o_models::{LoadOptions, ModelSource, PrefillOptions, passkey};

/// Post-RoPE q, k, v of the layers of needle-7m on a passkey prompt, and the softmax scale.
pub fn captured(tokens: usize, layers: &[usize], device: &Device) -> Result<Vec<(usize, [Tensor; 3], f32)>> {
    let options = LoadOptions { device: device.clone(), ..LoadOptions::default() };
    let model = ModelSource::Needle7m.load(&options, None)?;
    let prompt = passkey::build(&model.tokenizer, tokens, 0.5, 0)?;
    let mut cache = model.decoder.new_cache(1, prompt.tokens.len())?;
    let capture = Capture { layers: layers.to_vec(), taken: Mutex::default() };
    model.decoder.prefill(&model.prompt(&prompt.tokens)?, &mut cache, &capture, PrefillOptions::new())?;
    Ok(capture.taken.into_inner().expect("no thread panicked"))
}

/// All layers side by side as the heads of one call: (1, tokens, 24, 128) queries, 12 KV heads.
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

/// Dense attention that keeps a copy of what it is given.
#[derive(Debug)]
struct Capture {
    layers: Vec<usize>,
    taken: Mutex<Vec<(usize, [Tensor; 3], f32)>>,
}

impl Attention for Capture {
    fn name(&self) -> &str {
        "capture"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        if self.layers.contains(&call.layer) {
            let copy = |t: &Tensor| t.contiguous()?.copy();
            self.taken.lock().expect("no thread panicked").push((
                call.layer,
                [copy(q)?, copy(k)?, copy(v)?],
                call.softmax_scale,
            ));
        }
        candle_s2o::Dense.prefill(call, q, k, v)
    }
}
