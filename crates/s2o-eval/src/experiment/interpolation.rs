//! [`ErrorCurve`]: a method's error between the densities at which it was measured.

/// Error over density: straight lines between the measured points, the error on a logarithmic scale.
///
/// A setting with more density and more error than another is never useful, so the curve never rises with density. It
/// has no value outside the measured densities and ignores points where nothing was skipped, because their error is
/// only rounding.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorCurve {
    /// Ascending in density, each with the logarithm of the least error so far.
    points: Vec<(f64, f64)>,
}

impl ErrorCurve {
    /// The curve through pairs of density and error, in any order.
    pub fn new(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut points: Vec<(f64, f64)> =
            points.into_iter().filter(|&(density, error)| density < 1.0 && error > 0.0 && error.is_finite()).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|point| point.0);
        let mut least = f64::INFINITY;
        for (_, error) in &mut points {
            least = least.min(error.ln());
            *error = least;
        }
        Self { points }
    }

    /// Smallest and largest density with a value.
    pub fn range(&self) -> Option<(f64, f64)> {
        Some((self.points.first()?.0, self.points.last()?.0))
    }

    /// The error at a density; `None` outside [`ErrorCurve::range`].
    pub fn at(&self, density: f64) -> Option<f64> {
        let right = self.points.partition_point(|point| point.0 < density);
        let &(right_density, right_error) = self.points.get(right)?;
        if right_density == density {
            return Some(right_error.exp());
        }
        let &(left_density, left_error) = self.points.get(right.checked_sub(1)?)?;
        let share = (density - left_density) / (right_density - left_density);
        Some((left_error + share * (right_error - left_error)).exp())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn halfway_between_two_errors_is_their_geometric_mean() {
        let curve = ErrorCurve::new([(0.6, 1e-6), (0.2, 1e-2), (0.4, 1e-4)]);
        assert_eq!(curve.range(), Some((0.2, 0.6)));
        for (density, error) in [(0.2, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.55, 10f64.powf(-5.5)), (0.6, 1e-6)] {
            let got = curve.at(density).unwrap();
            assert!((got / error - 1.0).abs() < 1e-9, "{density}: {got}");
        }
    }

    #[test]
    fn nothing_is_said_outside_the_measured_densities() {
        let curve = ErrorCurve::new([(0.6, 1e-6), (0.2, 1e-2), (1.0, 1e-14), (0.8, 0.0)]);
        assert_eq!((curve.at(0.19), curve.at(0.61), curve.at(1.0)), (None, None, None));
        assert_eq!((ErrorCurve::new([]).at(0.5), ErrorCurve::new([]).range()), (None, None));
        let lone = ErrorCurve::new([(0.5, 1e-3)]);
        assert!((lone.at(0.5).unwrap() - 1e-3).abs() < 1e-15 && lone.at(0.4).is_none());
    }

    #[test]
    fn a_denser_setting_that_errs_more_is_not_taken() {
        let curve = ErrorCurve::new([(0.2, 1e-3), (0.4, 1e-2), (0.6, 1e-4)]);
        assert!((curve.at(0.4).unwrap() / 1e-3 - 1.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn the_error_never_rises(
            points in proptest::collection::vec((0.0f64..1.0, 1e-9f64..1.0), 1..9),
            a in 0.0f64..1.0,
            b in 0.0f64..1.0,
        ) {
            let curve = ErrorCurve::new(points);
            if let (Some(sparser), Some(denser)) = (curve.at(a.min(b)), curve.at(a.max(b))) {
                prop_assert!(denser <= sparser * (1.0 + 1e-12));
            }
        }
    }
}
