//! [`ScoreScale`]: from the product of a query and a key to its score.

use crate::error::S2oError;

/// The score of a query and a key: `softmax_scale * <q, k>`, or with a cap `softcap * tanh(softmax_scale * <q, k> /
/// softcap)`, as in Gemma 2 and in FlashAttention. An `f32` converts to a scale without a cap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreScale {
    /// Factor on the product.
    pub softmax_scale: f32,
    /// Bound on the size of a score.
    pub softcap: Option<f32>,
}

impl From<f32> for ScoreScale {
    fn from(softmax_scale: f32) -> Self {
        Self { softmax_scale, softcap: None }
    }
}

impl ScoreScale {
    /// Returns the scale, checked.
    ///
    /// # Errors
    /// If the factor is not finite, or the cap is not positive and finite.
    pub fn checked(self) -> Result<Self, S2oError> {
        if !self.softmax_scale.is_finite() {
            return Err(S2oError::SoftmaxScale { got: self.softmax_scale });
        }
        match self.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            Some(got) => Err(S2oError::Softcap { got }),
            None => Ok(self),
        }
    }

    /// The score of a product.
    pub fn score(&self, product: f64) -> f64 {
        let score = f64::from(self.softmax_scale) * product;
        self.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_scaled_and_capped() {
        assert_eq!(ScoreScale::from(0.25).score(8.0), 2.0);
        let capped = ScoreScale { softmax_scale: 0.25, softcap: Some(2.0) };
        assert_eq!([0.0, 8.0, -1e9].map(|product| capped.score(product)), [0.0, 2.0 * 1f64.tanh(), -2.0]);
    }

    #[test]
    fn scales_and_caps_are_checked() {
        let with = |softmax_scale, softcap| ScoreScale { softmax_scale, softcap }.checked();
        assert!(with(-0.5, Some(50.0)).is_ok());
        assert!(matches!(with(f32::NAN, None), Err(S2oError::SoftmaxScale { got }) if got.is_nan()));
        for got in [0.0, -1.0, f32::INFINITY] {
            assert_eq!(with(0.5, Some(got)), Err(S2oError::Softcap { got }));
        }
        let error = with(0.5, Some(-1.0)).unwrap_err().to_string();
        assert_eq!(error, "softcap: expected a positive finite number, got -1; leave it out for none");
    }
}
