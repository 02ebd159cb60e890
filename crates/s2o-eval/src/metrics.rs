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

/// A falling quantity, such as error over density or time over error: straight lines between the measured points, the
/// quantity on a logarithmic scale. A setting that is worse in both than another is never useful, so the curve never
/// rises. It has no value outside the measured points.
#[derive(Debug, Clone, PartialEq)]
pub struct FallingCurve {
    /// Ascending in x, each with the logarithm of the least y so far.
    points: Vec<(f64, f64)>,
}

impl FallingCurve {
    /// The curve through pairs of x and y, in any order. Pairs whose y is not positive and finite are left out.
    pub fn new(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut points: Vec<(f64, f64)> = points.into_iter().filter(|&(_, y)| y > 0.0 && y.is_finite()).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|point| point.0);
        let mut least = f64::INFINITY;
        for (_, y) in &mut points {
            least = least.min(y.ln());
            *y = least;
        }
        Self { points }
    }

    /// The value at `x`.
    pub fn at(&self, x: f64) -> Option<f64> {
        let right = self.points.partition_point(|point| point.0 < x);
        let &(right_x, right_y) = self.points.get(right)?;
        if right_x == x {
            return Some(right_y.exp());
        }
        let &(left_x, left_y) = self.points.get(right.checked_sub(1)?)?;
        let share = (x - left_x) / (right_x - left_x);
        Some((left_y + share * (right_y - left_y)).exp())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

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

    #[test]
    fn halfway_between_two_errors_is_their_geometric_mean() {
        let curve = FallingCurve::new([(0.6, 1e-6), (0.2, 1e-2), (0.4, 1e-4)]);
        for (density, error) in [(0.2, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.55, 10f64.powf(-5.5)), (0.6, 1e-6)] {
            let got = curve.at(density).unwrap();
            assert!((got / error - 1.0).abs() < 1e-9, "{density}: {got}");
        }
    }

    #[test]
    fn nothing_is_said_outside_the_measured_points() {
        let curve = FallingCurve::new([(0.6, 1e-6), (0.2, 1e-2), (0.8, 0.0)]);
        assert_eq!((curve.at(0.19), curve.at(0.61), curve.at(0.8)), (None, None, None));
        assert_eq!(FallingCurve::new([]).at(0.5), None);
        let lone = FallingCurve::new([(0.5, 1e-3)]);
        assert!((lone.at(0.5).unwrap() - 1e-3).abs() < 1e-15 && lone.at(0.4).is_none());
    }

    #[test]
    fn a_denser_setting_that_errs_more_is_not_taken() {
        let curve = FallingCurve::new([(0.2, 1e-3), (0.4, 1e-2), (0.6, 1e-4)]);
        assert!((curve.at(0.4).unwrap() / 1e-3 - 1.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn a_curve_never_rises(
            points in proptest::collection::vec((0.0f64..1.0, 1e-9f64..1.0), 1..9),
            a in 0.0f64..1.0,
            b in 0.0f64..1.0,
        ) {
            let curve = FallingCurve::new(points);
            if let (Some(sparser), Some(denser)) = (curve.at(a.min(b)), curve.at(a.max(b))) {
                prop_assert!(denser <= sparser * (1.0 + 1e-12));
            }
        }
    }
}
