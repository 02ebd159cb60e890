//! Post-RoPE tensors of a trained model, see tests/data/README.md.

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use candle_s2o::{AttnShape, Mask, PrefillCall, block_sparse_attn, dense_attn};
use s2o_baselines::BlockSelector;

use crate::agreement::Inputs;
use crate::plain::lists;

/// q, k and v of layer 12, `(1, 1536, 1, 64)`.
fn tensors() -> [Tensor; 3] {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/smollm2_layer12.safetensors");
    let file =
        candle_core::safetensors::load(&path, &Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    ["q", "k", "v"].map(|name| file[name].unsqueeze(0).unwrap())
}

/// The whole prompt, and chunks that begin at a block, inside a block, and with the last query.
pub fn calls() -> Vec<Inputs> {
    let [q, k, v] = tensors();
    let part = |start: usize, end: usize| {
        let tensors =
            [q.narrow(1, start, end - start).unwrap(), k.narrow(1, 0, end).unwrap(), v.narrow(1, 0, end).unwrap()];
        let shape = AttnShape::new([1, end - start, 1, 64], [end, 1]).unwrap();
        let call = PrefillCall { layer: 0, softmax_scale: 0.125, prompt_len: 1536 };
        Inputs { shape, call, tensors }
    };
    vec![part(0, 1536), part(1024, 1536), part(700, 1401), part(1535, 1536)]
}

/// Density, mean squared error and relative L1 error of a method on the whole prompt.
pub fn measure(selector: &impl BlockSelector) -> [f64; 3] {
    let Inputs { shape, call, tensors: [q, k, v] } = calls().swap_remove(0);
    let selection = selector.select(&call, &q, &k, &v).unwrap();
    let density = lists(&selection).work(&shape)[0].density();
    let (out, _) = block_sparse_attn(&q, &k, &v, call.softmax_scale, Mask::Causal, lists(&selection).clone()).unwrap();
    let dense = dense_attn(&q, &k, &v, call.softmax_scale, Mask::Causal).unwrap();
    let mean = |x: Tensor| f64::from(x.mean_all().unwrap().to_scalar::<f32>().unwrap());
    let error = (out - &dense).unwrap();
    [density, mean(error.sqr().unwrap()), mean(error.abs().unwrap()) / mean(dense.abs().unwrap())]
}
