//! Seeded tensors, error norms, ranks and GGUF files for the tests of this workspace. The numbers depend only on the
//! seed, not on the machine.

pub mod gguf;
pub mod ranks;

use candle_core::{DType, Device, Tensor};

/// A generator of uniform numbers in [-0.5, 0.5) (xorshift64).
pub fn uniform(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    }
}

/// `len` numbers in [-1, 1): half the sum of four uniform numbers, so bell-shaped with variance 1/12.
pub fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut draw = uniform(seed);
    (0..len).map(|_| (draw() + draw() + draw() + draw()) * 0.5).collect()
}

/// [`noise`] with a variance of about 1, as a tensor in CPU memory.
///
/// # Panics
/// If f32 does not convert to `dtype`.
pub fn tensor(dims: &[usize], seed: u64, dtype: DType) -> Tensor {
    let values: Vec<f32> = noise(dims.iter().product(), seed).into_iter().map(|x| x * 3.4).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).and_then(|x| x.to_dtype(dtype)).expect("converts")
}

/// `|a - b| / |b|` in the Euclidean norm; infinite if an element of `a` is not finite.
///
/// # Panics
/// If the lengths differ.
pub fn relative_l2<A: Copy + Into<f64>, B: Copy + Into<f64>>(a: &[A], b: &[B]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        let (a, b): (f64, f64) = (a.into(), b.into());
        if !a.is_finite() {
            return f64::INFINITY;
        }
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    (difference / norm).sqrt()
}

/// The largest `|a - b|` of two tensors of the same shape, in f32.
///
/// # Panics
/// If the shapes or devices differ.
pub fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    let difference = || (a.to_dtype(DType::F32)? - b.to_dtype(DType::F32)?)?.abs()?.flatten_all()?.max(0)?.to_scalar();
    difference().expect("tensors of one shape and device")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_see_every_difference() {
        assert_eq!(relative_l2(&[1.0f32, 2.0, 6.0], &[1.0f64, 2.0, 2.0]), 4.0 / 3.0);
        assert_eq!(relative_l2(&[f32::NAN, 0.0], &[0.0f32, 1.0]), f64::INFINITY);
        let (a, b) = (tensor(&[3, 4], 0, DType::F32), tensor(&[3, 4], 1, DType::F32));
        assert_eq!(max_difference(&a, &a), 0.0);
        assert!(max_difference(&a, &b) > 0.1);
    }
}
