//! Time of S2O and of blocks of the same density (Fig. 6).
//!
//! The blocks are chosen at random, and their choice takes no time. The comparison shows how well each way of skipping
//! turns density into speed, with S2O's ranking counted as S2O's time.

use std::num::NonZeroUsize;
use std::time::Instant;

use candle_s2o::{BlockLists, BlockSelection, Dense, HeadWork, Mask, block_sparse_attn, query_blocks};
use rand::seq::index;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde::{Deserialize, Serialize};

use super::Exact;
use super::matched_density::settings;
use crate::capture::LayerTensors;
use crate::error::Result;
use crate::method::MethodSpec;
use crate::metrics::median;

/// The blocks are the same in every run.
const SEED: u64 = 0;

/// One density on one layer. Seconds are medians of alternating runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeedRow {
    /// The method.
    pub method: String,
    /// The value of the option that trades error for density.
    pub value: Option<f64>,
    /// The layer.
    pub layer: usize,
    /// Keys.
    pub tokens: usize,
    /// Share of the causal tiles that the method computes.
    pub density: f64,
    /// Share of the causal tiles of the random blocks.
    pub block_density: f64,
    /// The method's time, selection included.
    pub seconds: f64,
    /// Its selection alone.
    pub selection_seconds: f64,
    /// The block-sparse executor's time.
    pub block_seconds: f64,
    /// Our dense attention's time.
    pub dense_seconds: f64,
    /// Time of the blocks over time of the method; above 1 the method is faster.
    pub ratio: f64,
}

/// Times `method` at every value of its knob against random blocks of the same density in every head.
///
/// # Errors
/// If the method refuses its options or the tensors.
pub fn matched_speed(exact: &Exact, method: &MethodSpec, repeats: NonZeroUsize) -> Result<Vec<SpeedRow>> {
    let shape = exact.tensors.shape()?;
    let mut rows = Vec::new();
    for (value, setting) in settings(method)? {
        let built = setting.build()?;
        let first = exact.run(built.as_ref())?;
        let selection = random_blocks(exact, &first.work)?;
        let blocks = || -> Result<f64> {
            let LayerTensors { q, k, v, softmax_scale, .. } = exact.tensors;
            let start = Instant::now();
            block_sparse_attn(q, k, v, *softmax_scale, Mask::Causal, selection.clone())
                .map_err(candle_core::Error::from)?;
            q.device().synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        // This call is not timed, because the first call on a GPU loads the kernels.
        blocks()?;
        exact.run(&Dense)?;
        let [mut own, mut ranking, mut block, mut dense] = [const { Vec::new() }; 4];
        for _ in 0..repeats.get() {
            let timed = exact.run(built.as_ref())?;
            ranking.push(timed.selection.as_secs_f64());
            own.push((timed.selection + timed.attention).as_secs_f64());
            block.push(blocks()?);
            dense.push(exact.run(&Dense)?.attention.as_secs_f64());
        }
        let (seconds, block_seconds) = (median(own), median(block));
        rows.push(SpeedRow {
            method: method.to_string(),
            value,
            layer: exact.layer(),
            tokens: exact.tokens(),
            density: first.density(),
            block_density: crate::method::density(&selection.work(&shape)),
            seconds,
            selection_seconds: median(ranking),
            block_seconds,
            dense_seconds: median(dense),
            ratio: block_seconds / seconds,
        });
    }
    Ok(rows)
}

/// For each head as many blocks as `work` says, spread over its query blocks in proportion to the visible blocks of
/// each. The diagonal block is always chosen, so that every query attends to itself. The others are random.
fn random_blocks(exact: &Exact, work: &[HeadWork]) -> Result<BlockSelection> {
    let shape = exact.tensors.shape()?;
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let visible: Vec<usize> = query_blocks(&shape, Mask::Causal)
        .map(|rows| (shape.q_offset() + rows.end).div_ceil(candle_s2o::BLOCK_Q))
        .collect();
    let all: usize = visible.iter().sum();
    let mut lists = Vec::with_capacity(work.len() * visible.len());
    for head in work {
        let wanted = head.density() * all as f64;
        // Wanted and chosen blocks so far, so that rounding errors do not add up.
        let (mut due, mut given) = (0.0, 0);
        for &visible in &visible {
            due += wanted * visible as f64 / all as f64;
            let count = ((due - given as f64).round().max(1.0) as usize).min(visible);
            given += count;
            let mut list: Vec<usize> = index::sample(&mut random, visible - 1, count - 1).into_vec();
            list.push(visible - 1);
            lists.push(list);
        }
    }
    Ok(BlockLists::new(lists).into())
}

#[cfg(test)]
mod tests {
    use super::super::random_layer;
    use super::*;

    #[test]
    fn blocks_have_the_density_of_each_head() {
        let mut layer = random_layer(6, 2000);
        layer.q = layer.q.narrow(1, 300, 1700).unwrap();
        let exact = Exact::new(&layer).unwrap();
        let shape = layer.shape().unwrap();
        let causal = HeadWork::dense(&shape)[0].causal;
        let work: Vec<HeadWork> =
            [0.2, 0.65].iter().map(|density| HeadWork::of_tiles(density * causal as f64, causal)).collect();
        let selection = random_blocks(&exact, &work).unwrap();
        selection.check(&shape, Mask::Causal).unwrap();
        for (wanted, got) in work.iter().zip(selection.work(&shape)) {
            assert!((wanted.density() - got.density()).abs() < 0.01, "{wanted:?} {got:?}");
        }
        let dense = random_blocks(&exact, &HeadWork::dense(&shape)).unwrap();
        assert_eq!(crate::method::density(&dense.work(&shape)), 1.0);
    }

    #[test]
    fn rows_compare_like_with_like() {
        let layer = random_layer(7, 1500);
        let exact = Exact::new(&layer).unwrap();
        let method: MethodSpec = "s2o:dense-below=0:segment=128".parse().unwrap();
        let rows = matched_speed(&exact, &method, NonZeroUsize::new(2).unwrap()).unwrap();
        assert_eq!(rows.len(), settings(&method).unwrap().len());
        for row in &rows {
            assert!((row.density - row.block_density).abs() < 0.02, "{row:?}");
            assert!(row.seconds > row.selection_seconds && row.block_seconds > 0.0 && row.dense_seconds > 0.0);
            assert!((row.ratio - row.block_seconds / row.seconds).abs() < 1e-12);
        }
    }
}
