//! How far an output is from the exact one.

use std::ops::AddAssign;

use serde::Serialize;

/// Sums behind [`Errors`], in f64. Parts of a tensor are summed apart and added.
#[derive(Debug, Clone, Copy, Default)]
pub struct ErrorSums {
    count: f64,
    squared: f64,
    absolute: f64,
    exact_absolute: f64,
    exact_squared: f64,
    other_squared: f64,
    product: f64,
}

impl ErrorSums {
    /// Takes in elements of the exact output and of the other one.
    pub fn of(exact: &[f32], other: &[f32]) -> Self {
        let mut sums = Self::default();
        for (&exact, &other) in exact.iter().zip(other) {
            let (exact, other) = (f64::from(exact), f64::from(other));
            let difference = exact - other;
            sums.count += 1.0;
            sums.squared += difference * difference;
            sums.absolute += difference.abs();
            sums.exact_absolute += exact.abs();
            sums.exact_squared += exact * exact;
            sums.other_squared += other * other;
            sums.product += exact * other;
        }
        sums
    }

    /// The measures over everything taken in.
    pub fn errors(&self) -> Errors {
        // 0 / 0 is no error: both outputs are zero. Anything else over 0 stays infinite.
        let ratio = |part: f64, whole: f64, of_zeros: f64| {
            if part == whole && whole == 0.0 { of_zeros } else { part / whole }
        };
        let norms = (self.exact_squared * self.other_squared).sqrt();
        Errors {
            mse: ratio(self.squared, self.count, 0.0),
            mae: ratio(self.absolute, self.count, 0.0),
            rel_l1: ratio(self.absolute, self.exact_absolute, 0.0),
            cosine: ratio(self.product, norms, 1.0),
        }
    }
}

impl AddAssign for ErrorSums {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.squared += other.squared;
        self.absolute += other.absolute;
        self.exact_absolute += other.exact_absolute;
        self.exact_squared += other.exact_squared;
        self.other_squared += other.other_squared;
        self.product += other.product;
    }
}

/// Difference between an output and the exact one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Errors {
    /// Mean squared error.
    pub mse: f64,
    /// Mean absolute error.
    pub mae: f64,
    /// Sum of absolute differences over sum of absolute exact values.
    pub rel_l1: f64,
    /// Cosine of the angle between the flattened outputs.
    pub cosine: f64,
}
