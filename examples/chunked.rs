//! A prompt in chunks, as for long prompts: the outputs are those of the whole prompt in one call.
//!
//! ```text
//! cargo run --release --example chunked
//! ```

use candle_core::{DType, Device, Tensor};
use candle_s2o::{S2oConfig, S2oOp, s2o_attn};

const TOKENS: usize = 8192;
/// A multiple of the segment length, so that the chunks have the segments of the whole prompt.
const CHUNK: usize = 2048;

fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available(0)?;
    // bf16 on a GPU, whose kernels take no f32.
    let dtype = device.bf16_default_to_f32();
    let q = Tensor::randn(2f32, 1f32, (1, TOKENS, 4, 64), &device)?.to_dtype(dtype)?;
    let k = Tensor::randn(0f32, 1f32, (1, TOKENS, 2, 64), &device)?.to_dtype(dtype)?;
    let v = Tensor::randn(0f32, 1f32, (1, TOKENS, 2, 64), &device)?.to_dtype(dtype)?;
    let softmax_scale = 1.0 / 64f32.sqrt();
    let config = S2oConfig::default();

    // Each chunk has its own queries and all keys up to its end: its queries are the last positions of those keys. The
    // length of the whole prompt determines segment length, dense tail and dense path.
    let op = S2oOp::new(softmax_scale, config.clone()).with_prompt_len(TOKENS);
    let mut outputs = Vec::new();
    for start in (0..TOKENS).step_by(CHUNK) {
        let [queries, keys, values] =
            [q.narrow(1, start, CHUNK)?, k.narrow(1, 0, start + CHUNK)?, v.narrow(1, 0, start + CHUNK)?];
        let (output, stats) = op.clone().apply_with_stats(&queries, &keys, &values)?;
        println!("queries {start} to {}: density {:.3}", start + CHUNK, stats.density());
        outputs.push(output);
    }

    let whole = s2o_attn(&q, &k, &v, softmax_scale, &config)?;
    let difference = (Tensor::cat(&outputs, 1)? - whole)?.abs()?.max_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    println!("largest difference from the whole prompt: {difference}");
    Ok(())
}
