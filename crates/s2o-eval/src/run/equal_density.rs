//! [`Runner::at_densities`]: methods that compute the same share of the tiles.

use serde::{Deserialize, Serialize};

use super::runner::Runner;
use super::sample::Sample;
use crate::error::{EvalError, Result};
use crate::experiment::matched_density::settings;
use crate::method::{MethodSpec, find};

/// A method whose knob is set so that it has about a given density at a prompt length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AtDensity {
    /// The method as requested.
    pub method: MethodSpec,
    /// The density.
    pub density: f64,
    /// The prompt length in tokens.
    pub context_tokens: usize,
    /// The method with its knob; `None` if no value of the sweep is below the density, or none above.
    pub setting: Option<MethodSpec>,
}

impl AtDensity {
    /// The method's name in tables, such as `s2o@0.1`.
    pub fn name(&self) -> String {
        format!("{}@{}", self.method, self.density)
    }
}

/// Number of prefills of each sample in [`Runner::at_densities`] for a method; 0 if it has no knob to set.
///
/// # Errors
/// If the method does not exist.
pub fn knob_prefills(method: &MethodSpec) -> Result<usize> {
    Ok(settings(method)?.iter().filter(|(value, _)| value.is_some()).count())
}

impl Runner<'_> {
    /// Sets the knob of each method for each density at one prompt length. Prefills every sample with every value of
    /// the method's sweep, and interpolates between the two values around the density, on logarithmic scales. A method
    /// with a break-even has none here, because below it everything is dense. A method without a knob is left out.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] for a density outside 0 to 1; as [`MethodSpec::build`] and [`Runner::run`].
    pub fn at_densities(
        &self,
        methods: &[MethodSpec],
        densities: &[f64],
        samples: &[&Sample],
    ) -> Result<Vec<AtDensity>> {
        for density in densities {
            if !(*density > 0.0 && *density < 1.0) {
                return Err(EvalError::wrong("density", "a number between 0 and 1", density));
            }
        }
        let Some(context_tokens) = samples.first().map(|sample| sample.context_tokens()) else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for method in methods {
            let row = find(method.name())?;
            let Some(knob) = row.knob.filter(|_| !densities.is_empty()) else { continue };
            let has_break_even = row.options().contains(&BREAK_EVEN) && method.option(BREAK_EVEN).is_none();
            let sparse = if has_break_even { method.clone().with(BREAK_EVEN, 0) } else { method.clone() };
            let mut points = Vec::new();
            for (value, setting) in settings(&sparse)? {
                let Some(value) = value else { continue };
                points.push((self.density(&setting, samples)?, value));
            }
            for &density in densities {
                let value = knob_at(&mut points, density);
                let setting = value.map(|value| sparse.clone().with(knob.option, rounded(value, knob.sweep)));
                found.push(AtDensity { method: method.clone(), density, context_tokens, setting });
            }
        }
        Ok(found)
    }
}

const BREAK_EVEN: &str = "dense-below";

/// Four digits; a whole number if the sweep has only whole numbers.
fn rounded(value: f64, sweep: &[f64]) -> String {
    let is_whole = sweep.iter().all(|value| value.fract() == 0.0);
    let decimals = if is_whole { 0 } else { (3.0 - value.log10().floor()).max(0.0) as usize };
    format!("{value:.decimals$}")
}

/// The knob's value at a density, from pairs of density and value in any order.
fn knob_at(points: &mut [(f64, f64)], density: f64) -> Option<f64> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let right = points.partition_point(|point| point.0 < density);
    let &(right_density, right_value) = points.get(right)?;
    if right_density == density {
        return Some(right_value);
    }
    let &(left_density, left_value) = points.get(right.checked_sub(1)?)?;
    let share = (density / left_density).ln() / (right_density / left_density).ln();
    Some((left_value.ln() + share * (right_value / left_value).ln()).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_knob_lies_between_its_neighbours() {
        let mut points = [(0.4, 0.01), (0.1, 0.16), (0.2, 0.04)];
        assert_eq!(knob_at(&mut points, 0.2), Some(0.04));
        assert!((knob_at(&mut points, 0.1 * 2f64.sqrt()).unwrap() - 0.08).abs() < 1e-12);
        assert_eq!([0.09, 0.41].map(|density| knob_at(&mut points, density)), [None; 2]);
        assert_eq!(knob_at(&mut [], 0.5), None);
        assert_eq!(
            [0.000_512_34, 0.912_34, 2.5].map(|value| rounded(value, &[0.1, 2.0])),
            ["0.0005123", "0.9123", "2.500"]
        );
        assert_eq!(rounded(256.4, &[512.0, 256.0]), "256");
    }
}
