//! Contribution of the parts of S2O (Table 3): local window alone, with ranked keys, with ranked queries too.

use std::num::NonZeroUsize;

use candle_core::Tensor;
use candle_s2o::{BLOCK_Q, BlockLists, BlockSelection, Mask, PrefillCall, S2oConfig, SegmentLen, query_blocks};
use s2o_baselines::{BaselineError, BlockSelector, BlockSparse, Selection};
use serde::{Deserialize, Serialize};

use super::Exact;
use crate::error::Result;
use crate::method::{Method, MethodSpec, shape_of};

/// One variant on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComponentRow {
    /// The method that all other settings come from.
    pub settings: String,
    /// `local window only`, `keys ranked` (no query permutation) or `keys and queries ranked`.
    pub component: String,
    /// Last queries that attend to all keys; with `local window only`, the blocks of 128 queries that hold them.
    pub dense_tail: usize,
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
    /// Time for ranking, in seconds.
    pub selection_seconds: f64,
    /// Time for attention, in seconds.
    pub attention_seconds: f64,
    /// Time of our dense attention in seconds, alternating with the variants.
    pub dense_seconds: f64,
    /// Time of dense attention over time for ranking and attention.
    pub speed_up: f64,
}

/// Runs the variants on a layer with the paper's settings and with the default settings, each without a dense tail and
/// with the default's dense tail. Seconds are medians of `repeats` alternating runs.
///
/// # Errors
/// If a variant refuses the tensors.
pub fn components(exact: &Exact, repeats: NonZeroUsize) -> Result<Vec<ComponentRow>> {
    let tails = [0, S2oConfig::default().dense_tail().resolve(exact.tokens())];
    let (mut variants, mut methods) = (Vec::new(), Vec::<Box<dyn Method>>::new());
    for (settings, preset) in [("s2o-paper", S2oConfig::paper()), ("s2o", S2oConfig::default())] {
        for tail in tails {
            let window = SegmentWindow { segment_len: preset.segment_len(), dense_tail: tail };
            variants.push((settings, "local window only", tail));
            methods.push(Box::new(BlockSparse::new(window)));
            for (component, q_perm) in [("keys ranked", "off"), ("keys and queries ranked", "on")] {
                let spec: MethodSpec = settings.parse()?;
                // The parts are measured at any length, even where dense attention is faster.
                let spec = spec.with("dense-below", 0).with("dense-tail", tail).with("q-perm", q_perm);
                variants.push((settings, component, tail));
                methods.push(spec.build()?);
            }
        }
    }
    let (dense_seconds, measured) = exact.measure_in_turns(&methods, repeats)?;
    let rows = variants.into_iter().zip(&measured).map(|((settings, component, dense_tail), measured)| ComponentRow {
        settings: settings.to_owned(),
        component: component.to_owned(),
        dense_tail,
        layer: exact.layer(),
        tokens: exact.tokens(),
        density: measured.density,
        mse: measured.errors.mse,
        mae: measured.errors.mae,
        rel_l1: measured.errors.rel_l1,
        cosine: measured.errors.cosine,
        selection_seconds: measured.selection_seconds,
        attention_seconds: measured.attention_seconds,
        dense_seconds,
        speed_up: dense_seconds / measured.seconds(),
    });
    Ok(rows.collect())
}

/// S2O's first pass alone: every query attends to its own segment up to itself and to nothing before. S2O has no option
/// for this, because it computes at least one prefix tile. The block-sparse executor computes the same tiles.
#[derive(Debug, Clone, Copy)]
struct SegmentWindow {
    segment_len: SegmentLen,
    dense_tail: usize,
}

impl BlockSelector for SegmentWindow {
    fn name(&self) -> &str {
        "local-window"
    }

    fn select(
        &self,
        call: &PrefillCall,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> std::result::Result<Selection, BaselineError> {
        let shape = shape_of(q, k, v)?;
        let segment = self.segment_len.resolve(call.prompt_len);
        let tail_start = call.prompt_len.saturating_sub(self.dense_tail);
        let lists: Vec<_> = query_blocks(&shape, Mask::Causal)
            .map(|rows| {
                let (start, end) = (shape.q_offset() + rows.start, shape.q_offset() + rows.end);
                let first = if end > tail_start { 0 } else { start / segment * segment };
                // A segment consists of whole blocks.
                first / BLOCK_Q..end.div_ceil(BLOCK_Q)
            })
            .collect();
        let heads = shape.batch() * shape.num_heads();
        let lists = (0..heads).flat_map(|_| lists.iter().cloned());
        Ok(BlockSelection::from(BlockLists::new(lists)).into())
    }
}

#[cfg(test)]
mod tests {
    use candle_s2o::dense_attn;

    use super::super::random_layer;
    use super::*;

    #[test]
    fn the_local_window_is_dense_attention_of_each_segment() {
        let layer = random_layer(8, 900);
        let exact = Exact::new(&layer).unwrap();
        let window = BlockSparse::new(SegmentWindow { segment_len: SegmentLen::Fixed(256), dense_tail: 0 });
        let timed = exact.run(&window).unwrap();
        for (start, len) in [(0, 256), (256, 256), (512, 256), (768, 132)] {
            let [q, k, v] = [&layer.q, &layer.k, &layer.v].map(|t| t.narrow(1, start, len).unwrap());
            let own = dense_attn(&q, &k, &v, layer.softmax_scale, Mask::Causal).unwrap();
            let got = timed.out.narrow(1, start, len).unwrap();
            let apart = (own - got).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(apart < 1e-5, "from {start}: {apart}");
        }
        // 3 tiles in each of the three whole segments and in the partial one, of 36.
        assert_eq!(timed.density(), 12.0 / 36.0);
        let tail = BlockSparse::new(SegmentWindow { segment_len: SegmentLen::Fixed(256), dense_tail: 128 });
        // The last two blocks of queries attend to 7 and 8 blocks of keys.
        assert_eq!(exact.run(&tail).unwrap().density(), (9.0 + 15.0) / 36.0);
    }

    #[test]
    fn each_part_comes_closer_to_dense() {
        let layer = random_layer(9, 3000);
        let rows = components(&Exact::new(&layer).unwrap(), NonZeroUsize::MIN).unwrap();
        assert_eq!(rows.len(), 12);
        let find = |settings: &str, component: &str, tail| {
            let is =
                |row: &&ComponentRow| (&*row.settings, &*row.component, row.dense_tail) == (settings, component, tail);
            rows.iter().find(is).unwrap()
        };
        assert!(rows.iter().all(|row| row.dense_seconds == rows[0].dense_seconds && row.speed_up > 0.0), "{rows:?}");
        for settings in ["s2o-paper", "s2o"] {
            for tail in [0, 128] {
                let (window, ranked) = (find(settings, "local window only", tail), find(settings, "keys ranked", tail));
                assert!(window.density < ranked.density && window.mse > ranked.mse, "{window:?} {ranked:?}");
                assert!(window.selection_seconds < ranked.selection_seconds, "{window:?} {ranked:?}");
            }
            let (without, with) = (find(settings, "keys ranked", 0), find(settings, "keys ranked", 128));
            assert!(without.density <= with.density, "{without:?} {with:?}");
        }
    }
}
