//! Settings of published methods by layer and head.

use std::collections::BTreeMap;

use candle_s2o::{Attention, Dense};
use s2o_baselines::{
    BlockSelector, BlockSparse, HeadPattern, MInference, MInferenceConfig, Sparge, SpargeBounds, SpargeConfig,
    SpargeHead, TuningCall,
};
use serde::{Deserialize, Serialize};

use crate::capture::LayerTensors;
use crate::error::Result;
use crate::method::density;
use crate::metrics::ErrorSums;

/// SpargeAttn's tuned settings of a layer, and their density and error on the tuning prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TunedSparge {
    /// The layer.
    pub layer: usize,
    /// Mean of the heads' `tau`, which is 1 for dense heads.
    pub mean_tau: f64,
    /// Mean of the `theta` of the heads that skip anything; `None` if none does.
    pub mean_theta: Option<f64>,
    /// Number of heads that compute everything.
    pub dense_heads: usize,
    /// `lambda`; `None` if no values are left out.
    pub lambda: Option<f32>,
    /// Share of the causal tiles that are computed, over all prompts.
    pub density: f64,
    /// Relative L1 error over all heads and prompts.
    pub rel_l1: f64,
    /// Largest relative L1 error of a head on a prompt. The bounds apply to it.
    pub head_rel_l1: f64,
}

/// MInference's search result for a layer, and its density and error on the prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SearchedMInference {
    /// The layer.
    pub layer: usize,
    /// Number of heads that attend to the first keys and the last keys.
    pub a_shape: usize,
    /// Number of heads that attend to single keys and distances.
    pub vertical_slash: usize,
    /// Number of heads that attend to blocks.
    pub block_sparse: usize,
    /// Share of the causal tiles that are computed, over all prompts.
    pub density: f64,
    /// Relative L1 error over all heads and prompts.
    pub rel_l1: f64,
    /// Largest relative L1 error of a head on a prompt.
    pub head_rel_l1: f64,
}

/// SpargeAttn's settings for the layers of `prompts`, each with its density and error on the prompts. A layer may occur
/// once for each prompt. `progress` gets the number of layers done and of all layers.
///
/// # Errors
/// If the shapes of a layer's tensors do not match, or if prompts differ in their heads.
pub fn tune_spargeattn(
    prompts: &[LayerTensors],
    bounds: SpargeBounds,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(SpargeConfig, Vec<TunedSparge>)> {
    let mut config = SpargeConfig::default();
    let rows = by_layer(prompts, progress, |layer, calls| {
        let found = Sparge::tune(calls, bounds)?;
        let (density, rel_l1, head_rel_l1) = measure(&Sparge::from_config(found.clone())?, calls)?;
        let settings = found.layers.values().flat_map(|settings| &settings.heads);
        let (dense, sparse): (Vec<SpargeHead>, Vec<SpargeHead>) = settings.partition(|head| head.tau >= 1.0);
        let row = TunedSparge {
            layer,
            mean_tau: mean(dense.iter().chain(&sparse).map(|head| head.tau)).unwrap_or(1.0),
            mean_theta: mean(sparse.iter().map(|head| head.theta)),
            dense_heads: dense.len(),
            lambda: found.layers.values().find_map(|settings| settings.lambda),
            density,
            rel_l1,
            head_rel_l1,
        };
        config.layers.extend(found.layers);
        Ok(row)
    })?;
    Ok((config, rows))
}

/// The patterns that `method` finds for the layers of `prompts`, each with its density and error on the prompts. A
/// layer may occur once for each prompt. `progress` gets the number of layers done and of all layers.
///
/// # Errors
/// If the shapes of a layer's tensors do not match, or if prompts differ in their heads.
pub fn search_minference(
    prompts: &[LayerTensors],
    method: &MInference,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(MInferenceConfig, Vec<SearchedMInference>)> {
    let mut config = MInferenceConfig::default();
    let rows = by_layer(prompts, progress, |layer, calls| {
        let found = method.search(calls)?;
        let (density, rel_l1, head_rel_l1) = measure(&MInference::from_config(found.clone())?, calls)?;
        let count =
            |is: fn(&HeadPattern) -> bool| found.layers.values().flatten().filter(|pattern| is(pattern)).count();
        let row = SearchedMInference {
            layer,
            a_shape: count(|pattern| matches!(pattern, HeadPattern::AShape { .. })),
            vertical_slash: count(|pattern| matches!(pattern, HeadPattern::VerticalSlash { .. })),
            block_sparse: count(|pattern| matches!(pattern, HeadPattern::BlockSparse { .. })),
            density,
            rel_l1,
            head_rel_l1,
        };
        config.layers.extend(found.layers);
        Ok(row)
    })?;
    Ok((config, rows))
}

/// A row for each layer, from its calls of all prompts.
fn by_layer<R>(
    prompts: &[LayerTensors],
    progress: &mut dyn FnMut(usize, usize),
    mut row: impl FnMut(usize, &[TuningCall]) -> Result<R>,
) -> Result<Vec<R>> {
    let mut layers: BTreeMap<usize, Vec<TuningCall>> = BTreeMap::new();
    for tensors in prompts {
        let LayerTensors { layer, q, k, v, .. } = tensors.clone();
        layers.entry(layer).or_default().push(TuningCall { call: tensors.call()?, q, k, v });
    }
    let all = layers.len();
    let rows = layers.into_iter().enumerate().map(|(done, (layer, calls))| {
        let row = row(layer, &calls)?;
        progress(done + 1, all);
        Ok(row)
    });
    rows.collect()
}

/// Density, relative L1 error, and the largest such error of a head, of a selector on the calls of a layer.
fn measure<S: BlockSelector>(selector: &S, calls: &[TuningCall]) -> Result<(f64, f64, f64)> {
    let (mut sums, mut work, mut head_rel_l1) = (ErrorSums::default(), Vec::new(), 0.0f64);
    for TuningCall { call, q, k, v } in calls {
        let exact = Dense.prefill(call, q, k, v)?;
        let (out, of_call) = BlockSparse::<S>::attend(call, [q, k, v], selector.select(call, q, k, v)?)?;
        let heads = ErrorSums::by_head(&exact, &out)?;
        head_rel_l1 = heads.iter().map(|head| head.errors().rel_l1).fold(head_rel_l1, f64::max);
        sums += heads.into_iter().sum();
        work.extend(of_call);
    }
    Ok((density(&work), sums.errors().rel_l1, head_rel_l1))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}
