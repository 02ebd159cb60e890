//! The mass that a query's skipped keys are expected to have, from mean and variance of the keys before its segment.

use crate::score_scale::ScoreScale;

/// Most keys that are read for mean and variance.
const SAMPLED_KEYS: usize = 256;

/// Positions of the keys before a segment that are read for their mean and variance, evenly spaced. `prefix_len` is the number
/// of keys before the segment.
pub(crate) fn sampled_keys(prefix_len: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
    let count = prefix_len.min(SAMPLED_KEYS);
    (0..count).map(move |i| i * prefix_len / count)
}

/// Weight of the variance, that of the default [`KeyScore`](crate::KeyScore). The estimate needs it for any order of the keys.
const SECOND_CUMULANT: f64 = 0.35;

/// Estimates the mean weight of the keys before a segment: the score of [`KeyScore::SecondCumulant`](crate::KeyScore) with
/// queries and keys exchanged.
#[derive(Debug, Clone)]
pub(crate) struct PrefixScore {
    /// Factors of a query and of its square, for each dimension.
    factors: Vec<[f64; 2]>,
}

impl PrefixScore {
    /// For keys with this mean and variance in each dimension.
    pub(crate) fn new((mean, variance): (Vec<f64>, Vec<f64>), scale: ScoreScale) -> Self {
        let scale = f64::from(scale.softmax_scale);
        let of_variance = SECOND_CUMULANT * scale * scale;
        let factors = mean.iter().zip(variance).map(|(mean, variance)| [scale * mean, of_variance * variance]);
        Self { factors: factors.collect() }
    }

    /// The logarithm of the mean weight for a query.
    pub(crate) fn of(&self, query: impl Iterator<Item = f64>) -> f64 {
        self.factors.iter().zip(query).map(|([linear, square], q)| (linear + square * q) * q).sum()
    }
}

/// The expected mass of the keys that a query skipped over the mass of those that it visited, up to a factor that the queries
/// of a segment share. `log_sum_exp` is the logarithm of the latter. 0 if nothing can be said.
///
/// It is at most 1: the mean key weighs no more than all visited keys. And it is at least `exp(-30)`, so that sums over probes
/// keep the smallest ones.
pub(crate) fn expected_mass(prefix_score: f64, log_sum_exp: f64) -> f64 {
    let log = prefix_score - log_sum_exp;
    if log.is_nan() { 0.0 } else { log.clamp(-30.0, 0.0).exp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_keys_are_spread_over_the_prefix() {
        assert_eq!(sampled_keys(0).count(), 0);
        assert!(sampled_keys(200).eq(0..200));
        assert!(sampled_keys(1024).eq((0..256).map(|i| 4 * i)));
        let odd: Vec<usize> = sampled_keys(384).collect();
        assert_eq!((odd.len(), odd[1], odd[2], odd[255]), (256, 1, 3, 382));
    }

    #[test]
    fn the_score_is_the_second_cumulant_of_the_keys() {
        let keys = PrefixScore::new((vec![1.0, -3.0], vec![4.0, 0.5]), 0.5.into());
        // 0.5 (2 - 18), and .35 * 0.25 (4 * 4 + 0.5 * 36) more.
        assert!((keys.of([2.0, 6.0].into_iter()) - (-8.0 + 0.0875 * 34.0)).abs() < 1e-12);
    }

    #[test]
    fn an_expected_mass_is_bounded() {
        assert!((expected_mass(-1.0, 2.0) - (-3.0f64).exp()).abs() < 1e-15);
        assert_eq!(expected_mass(3.0, 2.0), 1.0);
        assert_eq!(expected_mass(f64::INFINITY, 2.0), 1.0);
        assert_eq!(expected_mass(1.0, f64::INFINITY), (-30.0f64).exp());
        for (score, log_sum_exp) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, f64::INFINITY)] {
            assert_eq!(expected_mass(score, log_sum_exp), 0.0);
        }
    }
}
