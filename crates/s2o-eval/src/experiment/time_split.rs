//! Time for selection and attention (Fig. 5b, Fig. 1), with density and error.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::{Exact, Measured};
use crate::error::Result;
use crate::method::MethodSpec;

/// One method on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimeRow {
    /// The method, with its paper's settings unless the name sets others.
    pub method: String,
    /// The layer.
    pub layer: usize,
    /// Keys.
    pub tokens: usize,
    /// Time for selection, in seconds.
    pub selection_seconds: f64,
    /// Time for attention, in seconds.
    pub attention_seconds: f64,
    /// Time of our dense attention in seconds, alternating with the methods.
    pub dense_seconds: f64,
    /// Time of dense attention over time for selection and attention.
    pub speed_up: f64,
    /// Share of the causal tiles computed.
    pub density: f64,
    /// Mean squared error.
    pub mse: f64,
    /// Relative L1 error.
    pub rel_l1: f64,
}

/// Times `methods` on a layer, alternating with dense attention. Seconds are medians of `repeats` runs.
///
/// # Errors
/// If a method refuses its options or the tensors.
pub fn time_split(exact: &Exact, methods: &[MethodSpec], repeats: NonZeroUsize) -> Result<Vec<TimeRow>> {
    let built = methods.iter().map(MethodSpec::build).collect::<Result<Vec<_>>>()?;
    let (dense_seconds, measured) = exact.measure_in_turns(&built, repeats)?;
    let row = |(spec, measured): (&MethodSpec, &Measured)| TimeRow {
        method: spec.to_string(),
        layer: exact.layer(),
        tokens: exact.tokens(),
        selection_seconds: measured.selection_seconds,
        attention_seconds: measured.attention_seconds,
        dense_seconds,
        speed_up: dense_seconds / measured.seconds(),
        density: measured.density,
        mse: measured.errors.mse,
        rel_l1: measured.errors.rel_l1,
    };
    Ok(methods.iter().zip(&measured).map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::super::random_layer;
    use super::*;

    #[test]
    fn selecting_and_attending_are_apart() {
        let layer = random_layer(2, 1024);
        let methods: Vec<MethodSpec> =
            ["dense", "s2o:dense-below=0:segment=128"].iter().map(|text| text.parse().unwrap()).collect();
        let rows = time_split(&Exact::new(&layer).unwrap(), &methods, NonZeroUsize::new(3).unwrap()).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].selection_seconds, rows[0].density, rows[0].mse), (0.0, 1.0, 0.0));
        assert!(rows[1].selection_seconds > 0.0 && rows[1].attention_seconds > 0.0, "{:?}", rows[1]);
        assert_eq!(rows[0].dense_seconds, rows[1].dense_seconds);
        let seconds = rows[1].selection_seconds + rows[1].attention_seconds;
        assert!((rows[1].speed_up - rows[1].dense_seconds / seconds).abs() < 1e-12);
    }
}
