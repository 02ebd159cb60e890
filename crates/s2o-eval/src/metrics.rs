//! Errors of an output relative to the exact output, and the median of repeated measurements.

use std::iter::Sum;
use std::ops::AddAssign;

use candle_core::{DType, Result, Tensor};
use serde::Serialize;

/// Number of query positions that are converted to f32 at a time.
const POSITIONS: usize = 2048;

/// Sums for [`Errors`], in f64. The sums of a tensor's parts add up to those of the tensor.
///
/// In this order: the number of elements, squares and absolute values of the difference, absolute values and squares of
/// the exact output, squares of the other output, products of both.
#[derive(Debug, Clone, Copy, Default)]
pub struct ErrorSums([f64; 7]);

impl ErrorSums {
    /// Sums over elements of the exact output and of the other output.
    pub fn of(exact: &[f32], other: &[f32]) -> Self {
        let mut sums = Self::default();
        for (&exact, &other) in exact.iter().zip(other) {
            let (exact, other) = (f64::from(exact), f64::from(other));
            let off = exact - other;
            sums += Self([1.0, off * off, off.abs(), exact.abs(), exact * exact, other * other, exact * other]);
        }
        sums
    }

    /// Sums by head over outputs (batch, length, heads, head_dim) of any float dtype and device.
    ///
    /// # Errors
    /// If the shapes differ or a Candle operation fails.
    pub fn by_head(exact: &Tensor, other: &Tensor) -> Result<Vec<Self>> {
        let (_, len, num_heads, head_dim) = exact.dims4()?;
        if other.dims() != exact.dims() {
            candle_core::bail!("outputs to compare: expected {:?}, got {:?}", exact.dims(), other.dims());
        }
        let mut heads = vec![Self::default(); num_heads];
        for start in (0..len).step_by(POSITIONS) {
            let [exact, other] = [exact, other].map(|tensor| {
                let part = tensor.narrow(1, start, POSITIONS.min(len - start))?;
                part.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
            });
            let (exact, other) = (exact?, other?);
            for (i, (exact, other)) in exact.chunks_exact(head_dim).zip(other.chunks_exact(head_dim)).enumerate() {
                heads[i % num_heads] += Self::of(exact, other);
            }
        }
        Ok(heads)
    }

    /// The errors over all summed elements.
    pub fn errors(&self) -> Errors {
        // 0 / 0 means no error, because both outputs are zero. Any other ratio with 0 stays infinite.
        let ratio = |part: f64, whole: f64, of_zeros: f64| {
            if part == whole && whole == 0.0 { of_zeros } else { part / whole }
        };
        let [count, squared, absolute, exact_absolute, exact_squared, other_squared, product] = self.0;
        Errors {
            mse: ratio(squared, count, 0.0),
            mae: ratio(absolute, count, 0.0),
            rel_l1: ratio(absolute, exact_absolute, 0.0),
            rel_l2: ratio(squared, exact_squared, 0.0).sqrt(),
            cosine: ratio(product, (exact_squared * other_squared).sqrt(), 1.0),
        }
    }
}

impl AddAssign for ErrorSums {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, other)| *sum += other);
    }
}

impl Sum for ErrorSums {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |mut sum, part| {
            sum += part;
            sum
        })
    }
}

/// Difference between an output and the exact output.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Errors {
    /// Mean squared error.
    pub mse: f64,
    /// Mean absolute error.
    pub mae: f64,
    /// Sum of absolute differences over sum of absolute exact values.
    pub rel_l1: f64,
    /// L2 norm of the difference over that of the exact output.
    pub rel_l2: f64,
    /// Cosine of the angle between the flattened outputs.
    pub cosine: f64,
}

/// The middle value, or the mean of the two middle values for an even count; NaN without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn medians_by_hand() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn measures_by_hand() {
        let errors = ErrorSums::of(&[1.0, -2.0, 2.0], &[1.0, -1.0, 4.0]).errors();
        assert_eq!((errors.mse, errors.mae, errors.rel_l1), (5.0 / 3.0, 1.0, 3.0 / 5.0));
        assert_eq!(errors.rel_l2, (5.0f64 / 9.0).sqrt());
        assert!((errors.cosine - 11.0 / (9.0f64 * 18.0).sqrt()).abs() < 1e-15, "{errors:?}");
    }

    #[test]
    fn zeros_are_like_zeros_and_unlike_anything_else() {
        let errors = ErrorSums::of(&[0.0], &[0.0]).errors();
        assert_eq!(errors, Errors { mse: 0.0, mae: 0.0, rel_l1: 0.0, rel_l2: 0.0, cosine: 1.0 });
        let errors = ErrorSums::of(&[0.0], &[1.0]).errors();
        assert_eq!((errors.mse, errors.rel_l1), (1.0, f64::INFINITY));
        assert_eq!(ErrorSums::default().errors().mse, 0.0);
    }

    #[test]
    fn heads_are_apart_and_add_up() -> Result<()> {
        // One sequence of 3000 positions, more than one conversion takes; the second of two heads is off by 1.
        let exact = Tensor::ones((1, 3000, 2, 8), DType::F32, &Device::Cpu)?;
        let off = Tensor::new(&[0f32, 1.0], &Device::Cpu)?.reshape((1, 1, 2, 1))?;
        let heads = ErrorSums::by_head(&exact, &exact.broadcast_add(&off)?)?;
        let errors: Vec<Errors> = heads.iter().map(ErrorSums::errors).collect();
        assert_eq!((errors[0].mse, errors[1].mse, errors[1].rel_l1), (0.0, 1.0, 1.0));
        assert_eq!(heads.into_iter().sum::<ErrorSums>().errors().mse, 0.5);
        let error = ErrorSums::by_head(&exact, &exact.narrow(1, 0, 2999)?).unwrap_err();
        assert!(error.to_string().contains("expected [1, 3000, 2, 8], got [1, 2999, 2, 8]"), "{error}");
        Ok(())
    }
}
