//! Confidence interval of a mean over few samples.

/// The quantile of the normal distribution for 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// The Wilson 95 % interval of a mean of `count` scores from 0 to 1. It assumes scores of 0 and 1. Scores between
/// these vary less, so the interval is rather too wide than too narrow.
pub fn wilson(mean: f64, count: usize) -> (f64, f64) {
    if count == 0 {
        return (0.0, 1.0);
    }
    let n = count as f64;
    let shrink = 1.0 + Z * Z / n;
    let centre = (mean + Z * Z / (2.0 * n)) / shrink;
    let half = Z / shrink * (mean * (1.0 - mean) / n + Z * Z / (4.0 * n * n)).sqrt();
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_of_textbooks() {
        for (mean, count, low, high) in
            [(1.0, 20, 0.8389, 1.0), (0.5, 10, 0.2366, 0.7634), (0.0, 5, 0.0, 0.4345), (0.5, 0, 0.0, 1.0)]
        {
            let (got_low, got_high) = wilson(mean, count);
            assert!(
                (got_low - low).abs() < 1e-4 && (got_high - high).abs() < 1e-4,
                "{mean} of {count}: {got_low} {got_high}"
            );
        }
    }
}
