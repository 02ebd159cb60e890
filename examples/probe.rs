use candle_core::{Device, Tensor};
use std::time::Instant;
fn main() -> anyhow::Result<()> {
    let l: usize = std::env::args().nth(1).map_or(8192, |s| s.parse().unwrap());
    let d = &Device::Cpu;
    let q = Tensor::randn(0f32, 1., (1, l, 4, 128), d)?;
    let k = Tensor::randn(0f32, 1., (1, l, 2, 128), d)?;
    let v = Tensor::randn(0f32, 1., (1, l, 2, 128), d)?;
    let sc = 128f32.powf(-0.5);
    for _ in 0..3 {
        let t = Instant::now();
        let a = candle_s2o::dense_attn(&q, &k, &v, sc, true)?;
        let ours = t.elapsed().as_secs_f64();
        println!("ours {ours:.3}s {:.1} GF/s", (l * l) as f64 * 2. * 128. * 4. / ours / 1e9);
        let _ = a;
    }
    let t = Instant::now();
    let b = candle_nn::attention::flash_attn::<f32>(&q, &k, &v, sc, candle_nn::attention::AttnMask::causal_with_offset(0), None, None)?;
    println!("candle {:.3}s", t.elapsed().as_secs_f64());
    let a = candle_s2o::dense_attn(&q, &k, &v, sc, true)?;
    let e = ((a.transpose(1, 2)? - b)?.abs()?.max_all()?).to_scalar::<f32>()?;
    println!("max diff {e}");
    Ok(())
}
