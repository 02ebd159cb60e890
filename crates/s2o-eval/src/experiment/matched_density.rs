//! Error of all methods at the same density (Fig. 5a).

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::Exact;
use crate::error::Result;
use crate::method::{Knob, MethodSpec, find};
use crate::metrics::FallingCurve;

/// One method with one setting on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepRow {
    /// The method as requested.
    pub method: String,
    /// The option that trades error for density; empty if the method has none.
    pub option: String,
    /// Value of the option, if the method has one.
    pub value: Option<f64>,
    /// The layer.
    pub layer: usize,
    /// Keys.
    pub tokens: usize,
    /// Share of the causal tiles computed.
    pub density: f64,
    /// Mean squared error.
    pub mse: f64,
    /// Mean absolute error.
    pub mae: f64,
    /// Relative L1 error.
    pub rel_l1: f64,
    /// Cosine similarity.
    pub cosine: f64,
    /// Time for selection, in seconds.
    pub selection_seconds: f64,
    /// Time for attention, in seconds.
    pub attention_seconds: f64,
}

/// A method at a density, averaged over all layers and heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatchedRow {
    /// The method as requested.
    pub method: String,
    /// The density at which all methods are compared.
    pub density: f64,
    /// Number of layers that the errors are means over.
    pub layers: usize,
    /// Mean squared error; `None` if the sweep does not reach the density from both sides.
    pub mse: Option<f64>,
    /// Mean absolute error.
    pub mae: Option<f64>,
    /// Relative L1 error.
    pub rel_l1: Option<f64>,
}

/// The settings that a sweep of `spec` runs, each with the value of its option: the values of the method's table row,
/// or only the value that `spec` sets itself or by a file.
///
/// # Errors
/// If the method does not exist.
pub fn settings(spec: &MethodSpec) -> Result<Vec<(Option<f64>, MethodSpec)>> {
    Ok(match find(spec.name())?.knob {
        Some(Knob { file: Some(file), .. }) if spec.option(file).is_some() => vec![(None, spec.clone())],
        Some(Knob { option, sweep, .. }) if spec.option(option).is_none() => {
            sweep.iter().map(|value| (Some(*value), spec.clone().with(option, value))).collect()
        }
        Some(Knob { option, .. }) => {
            vec![(spec.option(option).and_then(|value| value.parse().ok()), spec.clone())]
        }
        None => vec![(None, spec.clone())],
    })
}

/// Runs `methods` on a layer, each with every value of its knob.
///
/// # Errors
/// If a method refuses its options or the tensors.
pub fn sweep(exact: &Exact, methods: &[MethodSpec]) -> Result<Vec<SweepRow>> {
    let mut rows = Vec::new();
    for spec in methods {
        let option = find(spec.name())?.knob.map_or("", |knob| knob.option);
        for (value, setting) in settings(spec)? {
            let measured = exact.measure(setting.build()?.as_ref())?;
            rows.push(SweepRow {
                method: spec.to_string(),
                option: option.to_owned(),
                value,
                layer: exact.layer(),
                tokens: exact.tokens(),
                density: measured.density,
                mse: measured.errors.mse,
                mae: measured.errors.mae,
                rel_l1: measured.errors.rel_l1,
                cosine: measured.errors.cosine,
                selection_seconds: measured.selection_seconds,
                attention_seconds: measured.attention_seconds,
            });
        }
    }
    Ok(rows)
}

/// All methods of a sweep at the same densities. A method's curve goes through the means over the layers at each of its
/// settings, since one value is set for a whole model. It has no value outside the measured densities. A method without
/// a knob, or with a knob that a file sets, has no rows.
pub fn at_densities(rows: &[SweepRow], densities: &[f64]) -> Vec<MatchedRow> {
    let mut methods: Vec<&str> = Vec::new();
    for row in rows {
        if !methods.contains(&row.method.as_str()) {
            methods.push(&row.method);
        }
    }
    let mut matched = Vec::new();
    for &density in densities {
        for &method in &methods {
            let own: Vec<&SweepRow> = rows.iter().filter(|row| row.method == method).collect();
            if own.iter().all(|row| row.value.is_none()) {
                continue;
            }
            let at = |error: fn(&SweepRow) -> f64| curve(&own, error).at(density);
            matched.push(MatchedRow {
                method: method.to_owned(),
                density,
                layers: own.iter().map(|row| row.layer).collect::<HashSet<_>>().len(),
                mse: at(|row| row.mse),
                mae: at(|row| row.mae),
                rel_l1: at(|row| row.rel_l1),
            });
        }
    }
    matched
}

/// A method's means over the layers for each setting. A setting that skips nothing has no error but rounding.
fn curve(rows: &[&SweepRow], error: fn(&SweepRow) -> f64) -> FallingCurve {
    let mut values: Vec<Option<f64>> = Vec::new();
    for row in rows {
        if !values.contains(&row.value) {
            values.push(row.value);
        }
    }
    let points = values.into_iter().map(|value| {
        let setting = || rows.iter().filter(|row| row.value == value);
        let mean = |of: fn(&SweepRow) -> f64| setting().map(|row| of(row)).sum::<f64>() / setting().count() as f64;
        (mean(|row| row.density), mean(error))
    });
    FallingCurve::new(points.filter(|point| point.0 < 1.0))
}

#[cfg(test)]
mod tests {
    use super::super::random_layer;
    use super::*;

    #[test]
    fn every_method_has_a_row_for_each_value() {
        let layer = random_layer(1, 1024);
        let methods: Vec<MethodSpec> =
            ["dense", "s2o:dense-below=0:segment=128", "s2o:dense-below=0:segment=128:tau=0", "sliding-window"]
                .iter()
                .map(|text| text.parse().unwrap())
                .collect();
        let rows = sweep(&Exact::new(&layer).unwrap(), &methods).unwrap();
        let of = |method: &MethodSpec| -> Vec<&SweepRow> {
            rows.iter().filter(|row| row.method == method.to_string()).collect()
        };
        for method in &methods {
            let expected: Vec<Option<f64>> = settings(method).unwrap().into_iter().map(|(value, _)| value).collect();
            assert_eq!(of(method).iter().map(|row| row.value).collect::<Vec<_>>(), expected, "{method}");
        }
        let dense = of(&methods[0])[0];
        assert_eq!((dense.density, dense.mse, dense.option.as_str()), (1.0, 0.0, ""));
        let never_stops = of(&methods[2])[0];
        assert_eq!((never_stops.density, never_stops.value), (1.0, Some(0.0)));
        assert!(never_stops.rel_l1 < 1e-5, "{never_stops:?}");
        let sparsest = *of(&methods[1]).last().unwrap();
        assert!(sparsest.density < 0.9 && sparsest.mse > 0.0, "{sparsest:?}");
    }

    #[test]
    fn curves_go_through_the_means_over_layers() {
        let row = |method: &str, value, layer, density, mse| SweepRow {
            method: method.to_owned(),
            option: "tau".to_owned(),
            value: Some(value),
            layer,
            tokens: 8,
            density,
            mse,
            mae: mse,
            rel_l1: mse,
            cosine: 1.0,
            selection_seconds: 0.0,
            attention_seconds: 0.0,
        };
        let rows = [
            row("a", 1.0, 0, 0.1, 1.5e-2),
            row("a", 1.0, 1, 0.3, 0.5e-2),
            row("a", 2.0, 0, 0.6, 1e-4),
            row("a", 2.0, 1, 0.6, 1e-4),
            row("b", 1.0, 0, 0.5, 1e-3),
            SweepRow { value: None, ..row("dense", 1.0, 0, 1.0, 0.0) },
        ];
        let matched = at_densities(&rows, &[0.4, 0.7]);
        assert_eq!(matched.len(), 4);
        assert_eq!((matched[0].method.as_str(), matched[0].layers), ("a", 2));
        assert!((matched[0].mse.unwrap() / 1e-3 - 1.0).abs() < 1e-9, "{:?}", matched[0]);
        assert!(matched[1..].iter().all(|row| row.mse.is_none()), "{matched:?}");
    }
}
