//! The search for the sparsest settings of SpargeAttn within an error bound.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use candle_s2o::{Mask, dense_attn};

use crate::attention::BlockSparse;
use crate::error::BaselineError;
use crate::selector::{BlockSelector, TuningCall};
use crate::sparge::Sparge;
use crate::sparge_config::{NAME, SpargeConfig, SpargeHead, SpargeLayer};

/// Shares, densest first. At 1 everything is computed, so some setting always keeps the bound.
const TAUS: [f64; 10] = [1.0, 0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3];
const THETAS: [f64; 5] = [0.9, 0.7, 0.5, 0.3, 0.0];
/// The most cautious first.
const LAMBDAS: [f32; 8] = [-30.0, -20.0, -15.0, -12.0, -10.0, -8.0, -6.0, -4.0];

/// Bounds on the relative L1 error of a head's output, `sum |out - dense| / sum |dense|`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpargeBounds {
    l1: f64,
    l2: f64,
}

/// 0.08 and 0.09, as published for Llama 3.1.
impl Default for SpargeBounds {
    fn default() -> Self {
        Self { l1: 0.08, l2: 0.09 }
    }
}

impl SpargeBounds {
    /// `l1` bounds the choice of blocks, `l2` the choice of blocks and the skipped values together.
    ///
    /// # Errors
    /// [`BaselineError::Option`] unless `0 < l1 <= l2`.
    pub fn new(l1: f64, l2: f64) -> Result<Self, BaselineError> {
        BaselineError::unless(l1 > 0.0 && l1.is_finite(), NAME, ["l1", "above 0"], l1)?;
        BaselineError::unless(l2 >= l1 && l2.is_finite(), NAME, ["l2", "at least l1"], l2)?;
        Ok(Self { l1, l2 })
    }

    /// Bound for the choice of blocks.
    pub fn l1(self) -> f64 {
        self.l1
    }

    /// Bound for skipped blocks and values together.
    pub fn l2(self) -> f64 {
        self.l2
    }
}

impl Sparge {
    /// Finds settings for the layers of `calls`, several of which may be of one layer. Each head gets the `tau` and
    /// `theta` of least mean density whose error stays within `l1` on every call. Each layer then gets the `lambda`
    /// that skips most with every head within `l2`. Every setting of a grid is tried, so this takes about 60 times the
    /// attention of the calls. CUDA skips no values, so no `lambda` is tuned there.
    ///
    /// # Errors
    /// [`BaselineError::HeadCount`] if calls of a layer differ in their heads, or the error of a refused call.
    pub fn tune(calls: &[TuningCall], bounds: SpargeBounds) -> Result<SpargeConfig, BaselineError> {
        let mut layers: BTreeMap<usize, Vec<&TuningCall>> = BTreeMap::new();
        for call in calls {
            layers.entry(call.call.layer).or_default().push(call);
        }
        let tuned = layers.into_iter().map(|(layer, calls)| Ok((layer, tune_layer(layer, &calls, bounds)?)));
        Ok(SpargeConfig { layers: tuned.collect::<Result<_, BaselineError>>()? })
    }
}

fn tune_layer(layer: usize, calls: &[&TuningCall], bounds: SpargeBounds) -> Result<SpargeLayer, BaselineError> {
    let heads = calls[0].q.dim(2)?;
    let mut dense = Vec::with_capacity(calls.len());
    for TuningCall { call, q, k, v } in calls {
        BaselineError::unless_equal_heads(NAME, layer, heads, q.dim(2)?)?;
        dense.push(dense_attn(q, k, v, call.softmax_scale, Mask::Causal)?);
    }
    let measure = |settings: &SpargeLayer| measure(layer, settings, calls, &dense);
    let everything = SpargeLayer { heads: vec![SpargeHead { tau: 1.0, theta: 0.0 }; heads], lambda: None };
    let mut density: Vec<f64> = measure(&everything)?.into_iter().map(|(_, density)| density).collect();
    let mut best = everything;
    for tau in TAUS.into_iter().filter(|&tau| tau < 1.0) {
        for theta in THETAS {
            let setting = SpargeHead { tau, theta };
            let found = measure(&SpargeLayer { heads: vec![setting; heads], lambda: None })?;
            for ((best, least), (error, density)) in best.heads.iter_mut().zip(&mut density).zip(found) {
                if error <= bounds.l1 && density < *least {
                    (*best, *least) = (setting, density);
                }
            }
        }
    }
    if calls[0].q.device().is_cpu() {
        for lambda in LAMBDAS {
            let lambda = SpargeLayer { lambda: Some(lambda), ..best.clone() };
            // No break at the first failure: errors need not grow with the number of skipped values.
            if measure(&lambda)?.iter().all(|&(error, _)| error <= bounds.l2) {
                best = lambda;
            }
        }
    }
    Ok(best)
}

/// By head, the greatest error of any call and sequence, and the density, summed over calls and sequences.
fn measure(
    layer: usize,
    settings: &SpargeLayer,
    calls: &[&TuningCall],
    dense: &[Tensor],
) -> Result<Vec<(f64, f64)>, BaselineError> {
    let heads = settings.heads.len();
    let sparge = Sparge::from_config(SpargeConfig { layers: [(layer, settings.clone())].into() })?;
    let mut outcome = vec![(0.0, 0.0); heads];
    for (TuningCall { call, q, k, v }, dense) in calls.iter().zip(dense) {
        let selection = sparge.select(call, q, k, v)?;
        let (out, work) = BlockSparse::<Sparge>::attend(call, [q, k, v], selection)?;
        let dense = dense.to_dtype(DType::F32)?;
        let error = magnitude(&(out.to_dtype(DType::F32)? - &dense)?)?;
        for (i, (error, dense)) in error.into_iter().zip(magnitude(&dense)?).enumerate() {
            let relative = if error == 0.0 { 0.0 } else { error / dense };
            let (greatest, density) = &mut outcome[i % heads];
            *greatest = f64::max(*greatest, relative);
            *density += work[i].density();
        }
    }
    Ok(outcome)
}

/// Sum of absolute values, by head (`b * num_heads + h`).
fn magnitude(x: &Tensor) -> Result<Vec<f64>, BaselineError> {
    let by_query = x.abs()?.sum(3)?.to_dtype(DType::F64)?;
    Ok(by_query.sum(1)?.flatten_all()?.to_vec1()?)
}
