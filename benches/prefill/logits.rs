//! Logits after a prompt: the time until they are available, and the difference of two.

use std::time::Instant;

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};

/// Largest relative difference of the logits of two exact models that choose different tokens, after tens of layers in
/// bf16. Wrong computations differ by about 1.
pub const EXACT_WITHIN: f64 = 0.1;

/// The logits of `run`, and the milliseconds until the host knows the likeliest token.
pub fn first_token(device: &Device, run: impl FnOnce() -> Result<Tensor>) -> Result<(Tensor, f64)> {
    device.synchronize()?;
    let start = Instant::now();
    let logits = run()?;
    logits.argmax(D::Minus1)?.to_scalar::<u32>()?;
    Ok((logits, start.elapsed().as_secs_f64() * 1e3))
}

/// Relative difference from the exact logits in the Euclidean norm, and whether both choose the same token.
pub fn apart(got: &Tensor, want: &Tensor) -> Result<(f64, bool)> {
    let floats = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
    let (got, want) = (floats(got)?, floats(want)?);
    let sum = |term: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().zip(&want).map(|(&a, &b)| term(f64::from(a), f64::from(b))).sum()
    };
    let error = (sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b)).sqrt();
    let first = |all: &[f32]| all.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index);
    Ok((error, first(&got) == first(&want)))
}
