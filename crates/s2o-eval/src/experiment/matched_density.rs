//! Error of all methods at the same density (Fig. 5a).

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::Exact;
use crate::error::Result;
use crate::method::{Knob, MethodSpec, find};

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

/// A method's means over the layers for each setting.
fn curve(rows: &[&SweepRow], error: fn(&SweepRow) -> f64) -> ErrorCurve {
    let mut values: Vec<Option<f64>> = Vec::new();
    for row in rows {
        if !values.contains(&row.value) {
            values.push(row.value);
        }
    }
    ErrorCurve::new(values.into_iter().map(|value| {
        let setting = || rows.iter().filter(|row| row.value == value);
        let mean = |of: fn(&SweepRow) -> f64| setting().map(|row| of(row)).sum::<f64>() / setting().count() as f64;
        (mean(|row| row.density), mean(error))
    }))
}

/// Error over density: straight lines between the measured points, the error on a logarithmic scale.
///
/// A setting with more density and more error than another is never useful, so the curve never rises with density. It
/// has no value outside the measured densities and ignores points where nothing was skipped, because their error is
/// only rounding.
struct ErrorCurve {
    /// Ascending in density, each with the logarithm of the least error so far.
    points: Vec<(f64, f64)>,
}

impl ErrorCurve {
    /// The curve through pairs of density and error, in any order.
    fn new(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
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

    fn at(&self, density: f64) -> Option<f64> {
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

    #[test]
    fn halfway_between_two_errors_is_their_geometric_mean() {
        let curve = ErrorCurve::new([(0.6, 1e-6), (0.2, 1e-2), (0.4, 1e-4)]);
        for (density, error) in [(0.2, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.55, 10f64.powf(-5.5)), (0.6, 1e-6)] {
            let got = curve.at(density).unwrap();
            assert!((got / error - 1.0).abs() < 1e-9, "{density}: {got}");
        }
    }

    #[test]
    fn nothing_is_said_outside_the_measured_densities() {
        let curve = ErrorCurve::new([(0.6, 1e-6), (0.2, 1e-2), (1.0, 1e-14), (0.8, 0.0)]);
        assert_eq!((curve.at(0.19), curve.at(0.61), curve.at(1.0)), (None, None, None));
        assert_eq!(ErrorCurve::new([]).at(0.5), None);
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
