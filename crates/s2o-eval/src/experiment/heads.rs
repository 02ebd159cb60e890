//! Density and error of each head of each layer.

use serde::{Deserialize, Serialize};

use super::{Exact, HeadMeasured};
use crate::error::Result;
use crate::method::MethodSpec;

/// One head of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadRow {
    /// The method.
    pub method: String,
    /// The layer.
    pub layer: usize,
    /// The query head.
    pub head: usize,
    /// Keys.
    pub tokens: usize,
    /// Share of the head's causal tiles that were computed.
    pub density: f64,
    /// Mean squared error.
    pub mse: f64,
    /// Relative L1 error.
    pub rel_l1: f64,
}

/// Runs `methods` on a layer.
///
/// # Errors
/// If a method refuses its options or the tensors.
pub fn heads(exact: &Exact, methods: &[MethodSpec]) -> Result<Vec<HeadRow>> {
    let mut rows = Vec::new();
    for spec in methods {
        let measured = exact.measure(spec.build()?.as_ref())?;
        rows.extend(measured.heads.iter().enumerate().map(|(head, &HeadMeasured { density, errors })| {
            let (method, layer, tokens) = (spec.to_string(), exact.layer(), exact.tokens());
            HeadRow { method, layer, head, tokens, density, mse: errors.mse, rel_l1: errors.rel_l1 }
        }));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::super::random_layer;
    use super::*;

    #[test]
    fn heads_average_to_the_layer() {
        let layer = random_layer(4, 1024);
        let exact = Exact::new(&layer).unwrap();
        let spec: MethodSpec = "s2o:dense-below=0:segment=128:tau=0.2".parse().unwrap();
        let rows = heads(&exact, std::slice::from_ref(&spec)).unwrap();
        assert_eq!(rows.iter().map(|row| (row.layer, row.head)).collect::<Vec<_>>(), [(4, 0), (4, 1)]);
        let whole = exact.measure(spec.build().unwrap().as_ref()).unwrap();
        let mean = |of: fn(&HeadRow) -> f64| rows.iter().map(of).sum::<f64>() / 2.0;
        assert!((mean(|row| row.density) - whole.density).abs() < 1e-12);
        assert!((mean(|row| row.mse) / whole.errors.mse - 1.0).abs() < 1e-9);
    }
}
