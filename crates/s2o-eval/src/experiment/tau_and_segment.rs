//! Threshold and segment length of S2O (Table 2).

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::Exact;
use crate::error::Result;
use crate::method::MethodSpec;

/// One threshold and segment length on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GridRow {
    /// The method for which threshold and segment length were set.
    pub method: String,
    /// The threshold.
    pub tau: f64,
    /// Tokens in a segment.
    pub segment: usize,
    /// The layer.
    pub layer: usize,
    /// Keys.
    pub tokens: usize,
    /// Share of the causal tiles computed.
    pub density: f64,
    /// Mean squared error.
    pub mse: f64,
    /// Relative L1 error.
    pub rel_l1: f64,
    /// Time for ranking, in seconds.
    pub selection_seconds: f64,
    /// Time for attention, in seconds.
    pub attention_seconds: f64,
    /// Time of our dense attention in seconds, alternating with the thresholds of a segment length.
    pub dense_seconds: f64,
    /// Time of dense attention over time for ranking and attention.
    pub speed_up: f64,
}

/// Runs an S2O method with every threshold and every segment length. Seconds are medians of `repeats` alternating runs.
///
/// # Errors
/// If the method has no options `tau` and `segment`, or refuses a value or the tensors.
pub fn tau_and_segment(
    exact: &Exact,
    method: &MethodSpec,
    taus: &[f64],
    segments: &[usize],
    repeats: NonZeroUsize,
) -> Result<Vec<GridRow>> {
    let mut rows = Vec::new();
    for &segment in segments {
        let built = taus
            .iter()
            .map(|tau| method.clone().with("segment", segment).with("tau", tau).build())
            .collect::<Result<Vec<_>>>()?;
        let (dense_seconds, measured) = exact.measure_in_turns(&built, repeats)?;
        rows.extend(taus.iter().zip(&measured).map(|(&tau, measured)| GridRow {
            method: method.to_string(),
            tau,
            segment,
            layer: exact.layer(),
            tokens: exact.tokens(),
            density: measured.density,
            mse: measured.errors.mse,
            rel_l1: measured.errors.rel_l1,
            selection_seconds: measured.selection_seconds,
            attention_seconds: measured.attention_seconds,
            dense_seconds,
            speed_up: dense_seconds / measured.seconds(),
        }));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::super::random_layer;
    use super::*;

    #[test]
    fn the_grid_is_complete() {
        let layer = random_layer(5, 1024);
        let exact = Exact::new(&layer).unwrap();
        let method: MethodSpec = "s2o:dense-below=0".parse().unwrap();
        let rows = tau_and_segment(&exact, &method, &[0.0, 0.3], &[128, 256], NonZeroUsize::MIN).unwrap();
        let grid: Vec<(f64, usize)> = rows.iter().map(|row| (row.tau, row.segment)).collect();
        assert_eq!(grid, [(0.0, 128), (0.3, 128), (0.0, 256), (0.3, 256)]);
        assert!(rows[0].density == 1.0 && rows[1].density < rows[3].density, "{rows:?}");
        for row in &rows {
            let seconds = row.selection_seconds + row.attention_seconds;
            assert!((row.speed_up - row.dense_seconds / seconds).abs() < 1e-12, "{row:?}");
        }
        let refused = tau_and_segment(&exact, &"sliding-window".parse().unwrap(), &[0.1], &[128], NonZeroUsize::MIN);
        assert!(refused.unwrap_err().to_string().contains("sliding-window: expected window"));
    }
}
