//! Settings for every layer of a model, from the user's prompts: thresholds of S2O in this module, and the settings of
//! published methods by layer and head in [`tune_spargeattn`] and [`search_minference`].
//!
//! [`Tuner`] is an attention method. It returns the exact output and also runs S2O with every threshold of a grid on
//! the inputs of the layer. Thus one dense prefill of each prompt measures all layers, and no tensors are kept. Each
//! threshold is measured itself, on the exact inputs of each layer. Nothing is interpolated, and error and density need
//! not be monotone in the threshold.

mod published;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result as CandleResult, Tensor};
use candle_s2o::{Attention, Dense, HeadWork, LayerSetting, PrefillCall, S2oConfig, S2oOp};
use serde::{Deserialize, Serialize};

use crate::error::{EvalError, Result};
use crate::method::{head_work, total};
use crate::metrics::ErrorSums;

pub use published::{SearchedMInference, TunedSparge, search_minference, tune_spargeattn};

/// The default thresholds to try.
pub const TAUS: [f32; 14] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5];

/// Dense attention that measures S2O on the same inputs.
#[derive(Debug)]
pub struct Tuner {
    /// The thresholds, with their configurations.
    configs: Vec<(f32, S2oConfig)>,
    /// Measurements by layer, one for each threshold.
    layers: Mutex<BTreeMap<usize, Vec<Trial>>>,
}

/// One threshold in one layer, over all calls so far.
#[derive(Debug, Clone, Copy, Default)]
struct Trial {
    errors: ErrorSums,
    work: HeadWork,
}

/// The tuned setting of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TunedLayer {
    /// The layer.
    pub layer: usize,
    /// The threshold; `None` if the layer stays dense.
    pub tau: Option<f32>,
    /// Share of the causal tiles that are computed, over all prompts.
    pub density: f64,
    /// Relative L1 error over all prompts.
    pub rel_l1: f64,
}

impl TunedLayer {
    /// The layer's entry in the settings.
    pub fn setting(&self) -> LayerSetting {
        self.tau.map_or(LayerSetting::Dense, LayerSetting::Tau)
    }
}

impl Tuner {
    /// Tries `taus` with the other options of `base`.
    ///
    /// # Errors
    /// [`EvalError::MethodOption`] for a threshold outside `[0, 1)`.
    pub fn new(base: &S2oConfig, taus: &[f32]) -> Result<Self> {
        let config = |&tau: &f32| base.to_builder().tau(tau).build().map(|config| (tau, config));
        let configs = taus.iter().map(config).collect::<Result<_, _>>();
        let configs =
            configs.map_err(|error| EvalError::MethodOption { method: "s2o".to_owned(), reason: error.to_string() })?;
        Ok(Self { configs, layers: Mutex::default() })
    }

    /// For each layer the sparsest threshold whose relative L1 error over all prompts is at most `bound`. The layer is
    /// dense if there is no such threshold, or if none skips anything.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] if `bound` is negative or not finite.
    pub fn choose(&self, bound: f64) -> Result<Vec<TunedLayer>> {
        if !(bound >= 0.0 && bound.is_finite()) {
            return Err(EvalError::wrong("bound on the relative L1 error", "a number of at least 0", bound));
        }
        let layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = layers.iter().map(|(&layer, trials)| {
            let dense = TunedLayer { layer, tau: None, density: 1.0, rel_l1: 0.0 };
            let tuned = trials.iter().zip(&self.configs).map(|(trial, &(tau, _))| TunedLayer {
                layer,
                tau: Some(tau),
                density: trial.work.density(),
                rel_l1: trial.errors.errors().rel_l1,
            });
            // A larger bound only adds candidates, so the result is never less sparse.
            tuned.filter(|trial| trial.rel_l1 <= bound).fold(dense, |best, trial| {
                let sparser = trial.density < best.density;
                let nearer = trial.density == best.density && trial.rel_l1 < best.rel_l1;
                if sparser || nearer { trial } else { best }
            })
        });
        Ok(chosen.collect())
    }
}

impl Attention for Tuner {
    fn name(&self) -> &str {
        Dense.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> CandleResult<Tensor> {
        let exact = Dense.prefill(call, q, k, v)?;
        let trials = self.configs.iter().map(|(_, config)| {
            let op = S2oOp::new(call.softmax_scale, config.clone()).with_prompt_len(call.prompt_len);
            let (out, stats) = op.apply_with_stats(q, k, v)?;
            let errors = ErrorSums::by_head(&exact, &out)?.into_iter().sum();
            Ok(Trial { errors, work: total(&head_work(&stats)) })
        });
        let trials = trials.collect::<CandleResult<Vec<Trial>>>()?;
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        let sums = layers.entry(call.layer).or_insert_with(|| vec![Trial::default(); trials.len()]);
        for (sum, trial) in sums.iter_mut().zip(trials) {
            sum.errors += trial.errors;
            sum.work = total([&sum.work, &trial.work]);
        }
        Ok(exact)
    }
}

#[cfg(test)]
mod tests {
    use candle_s2o::{LayerSettings, S2o, SegmentLen, TunedOn};

    use super::*;
    use crate::capture::LayerTensors;
    use crate::experiment::random_layer;
    use crate::method::density;

    fn base() -> S2oConfig {
        S2oConfig::builder().segment_len(SegmentLen::Fixed(128)).dense_below(0).build().unwrap()
    }

    /// Two layers, two prompts each.
    fn prompts() -> Vec<LayerTensors> {
        let layer = |layer, seed, len| LayerTensors { layer, ..random_layer(seed, len) };
        vec![layer(0, 1, 700), layer(0, 2, 1100), layer(1, 3, 700), layer(1, 4, 1100)]
    }

    fn tuner(prompts: &[LayerTensors]) -> Tuner {
        let tuner = Tuner::new(&base(), &TAUS).unwrap();
        for prompt in prompts {
            let exact = tuner.prefill(&prompt.call().unwrap(), &prompt.q, &prompt.k, &prompt.v).unwrap();
            assert_eq!(exact.dims(), prompt.q.dims());
        }
        tuner
    }

    /// Error and density of settings over the prompts of a layer, measured again.
    fn measured(settings: &LayerSettings, prompts: &[LayerTensors], layer: usize) -> (f64, f64) {
        let s2o = S2o::with_layers(base(), settings).unwrap().with_stats();
        let (mut sums, mut work) = (ErrorSums::default(), Vec::new());
        for prompt in prompts.iter().filter(|prompt| prompt.layer == layer) {
            let call = prompt.call().unwrap();
            let exact = Dense.prefill(&call, &prompt.q, &prompt.k, &prompt.v).unwrap();
            let out = s2o.prefill(&call, &prompt.q, &prompt.k, &prompt.v).unwrap();
            sums += ErrorSums::by_head(&exact, &out).unwrap().into_iter().sum();
            work.extend(head_work(&s2o.take_stats().unwrap()[&layer]));
        }
        (sums.errors().rel_l1, density(&work))
    }

    #[test]
    fn the_chosen_thresholds_keep_the_bound() {
        let prompts = prompts();
        let tuner = tuner(&prompts);
        for bound in [0.01, 0.1, 0.3, 1.0] {
            let chosen = tuner.choose(bound).unwrap();
            assert_eq!(chosen.iter().map(|layer| layer.layer).collect::<Vec<_>>(), [0, 1]);
            let settings = chosen.iter().map(TunedLayer::setting).collect();
            let settings = LayerSettings::new(TunedOn::default(), settings).unwrap();
            for layer in &chosen {
                let (error, density) = measured(&settings, &prompts, layer.layer);
                assert!(error <= bound, "{bound}: {error} {layer:?}");
                assert!((error - layer.rel_l1).abs() < 1e-6, "{error} {layer:?}");
                assert!((density - layer.density).abs() < 1e-12, "{density} {layer:?}");
            }
        }
    }

    #[test]
    fn a_looser_bound_is_never_less_sparse() {
        let tuner = tuner(&prompts());
        let mut before = tuner.choose(0.0).unwrap();
        assert!(before.iter().all(|layer| layer.tau.is_none() && layer.density == 1.0), "{before:?}");
        for bound in [1e-6, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.5, 2.0] {
            let chosen = tuner.choose(bound).unwrap();
            let pairs = before.iter().zip(&chosen);
            assert!(pairs.into_iter().all(|(tight, loose)| loose.density <= tight.density), "{before:?} {chosen:?}");
            before = chosen;
        }
        assert!(before.iter().all(|layer| layer.tau.is_some() && layer.density < 0.9), "{before:?}");
        for bound in [-1.0, f64::NAN] {
            assert!(tuner.choose(bound).is_err());
        }
        assert!(Tuner::new(&base(), &[1.0]).unwrap_err().to_string().contains("expected a number in [0, 1), got 1"));
    }
}
