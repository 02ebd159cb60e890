//! The choice by cumulative scores in f64, properties of every method that makes it, and the effect of rounding.

use candle_core::{DType, Tensor};
use candle_s2o::{Attention, AttnShape, Mask, PrefillCall, dense_attn};
use s2o_baselines::{BlockSelector, BlockSparse, Selection};

use crate::plain::{ascending, lists};

/// Relative error of scores in f32, about: 1e-5 for a logit of 100.
pub const ROUNDING: f64 = 2e-4;

/// Whether each block is among the fewest that reach `share` of the scores' sum, those of `kept` counted first. `None`
/// if rounding decides: the sum of the blocks above it, and of those that equal it, is within rounding of the share.
pub fn choice(scores: &[f64], kept: &[bool], share: f64) -> Vec<Option<bool>> {
    let total: f64 = scores.iter().sum();
    let (wanted, rounding) = (share * total, ROUNDING * total);
    let sum = |which: &dyn Fn(usize) -> bool| (0..scores.len()).filter(|&i| which(i)).map(|i| scores[i]).sum::<f64>();
    let first = sum(&|i| kept[i]);
    let decide = |block: usize| {
        if kept[block] {
            return Some(true);
        }
        let near = ROUNDING * scores[block];
        let above = first + sum(&|i| !kept[i] && scores[i] > scores[block] + near);
        let equal = sum(&|i| !kept[i] && i != block && (scores[i] - scores[block]).abs() <= near);
        match () {
            () if above + equal < wanted - rounding => Some(true),
            () if above > wanted + rounding => Some(false),
            () => None,
        }
    };
    (0..scores.len()).map(decide).collect()
}

/// Softmax of the given logits, 0 for the others.
pub fn softmax(logits: &[Option<f64>]) -> Vec<f64> {
    let max = logits.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| logit.map_or(0.0, |logit| (logit - max).exp())).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| if sum > 0.0 { weight / sum } else { 0.0 }).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The mean of some rows.
pub fn mean<'a>(rows: impl IntoIterator<Item = &'a Vec<f64>>) -> Vec<f64> {
    let mut count = 0.0;
    let mut sum = Vec::new();
    for row in rows {
        sum.resize(row.len(), 0.0);
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        count += 1.0;
    }
    sum.iter().map(|x| x / count).collect()
}

/// The number of blocks compared, and of those that rounding decided.
#[derive(Debug, Default, Clone, Copy)]
pub struct Compared {
    pub blocks: usize,
    pub open: usize,
}

impl Compared {
    /// Checks that the list has the blocks that `plain` chooses, among the blocks of `plain`; `None` may be either.
    pub fn list(&mut self, selection: &Selection, list: usize, plain: &[Option<bool>]) {
        let named = ascending(selection, list);
        assert!(named.iter().all(|&block| block < plain.len()), "list {list}: {named:?} of {}", plain.len());
        for (block, chosen) in plain.iter().enumerate() {
            let named = named.binary_search(&block).is_ok();
            self.blocks += 1;
            match chosen {
                Some(chosen) => assert_eq!(named, *chosen, "list {list}, block {block}"),
                None => self.open += 1,
            }
        }
    }

    /// Checks that rounding rarely decides; otherwise the comparison would say nothing.
    pub fn assert_decided(&self) {
        assert!(self.open * 200 <= self.blocks + 1000, "{self:?}");
    }
}

/// Checks that a method that leaves nothing out is dense attention.
pub fn assert_dense(method: impl BlockSelector, call: &PrefillCall, [q, k, v]: &[Tensor; 3]) {
    let method = BlockSparse::new(method);
    let out = method.prefill(call, q, k, v).unwrap();
    let dense = dense_attn(q, k, v, call.softmax_scale, Mask::Causal).unwrap();
    let error = (out - dense).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    assert!(error.to_scalar::<f32>().unwrap() < 1e-4);
    assert!(method.take_work()[&call.layer].iter().all(|head| head.density() == 1.0));
}

/// Half precision: checks that the choice is that of the same numbers in f32, and that the attention runs.
pub fn assert_takes_half_precision(method: impl BlockSelector, call: &PrefillCall, tensors: &[Tensor; 3]) {
    let method = BlockSparse::new(method);
    for dtype in [DType::BF16, DType::F16] {
        let [q, k, v] = tensors.each_ref().map(|x| x.to_dtype(dtype).unwrap());
        let half = method.selector().select(call, &q, &k, &v).unwrap();
        let full = [&q, &k, &v].map(|x| x.to_dtype(DType::F32).unwrap());
        let full = method.selector().select(call, &full[0], &full[1], &full[2]).unwrap();
        assert_eq!(lists(&half), lists(&full), "{dtype:?}");
        assert_eq!(method.prefill(call, &q, &k, &v).unwrap().dtype(), dtype);
    }
}

/// The sizes of a call on these tensors.
pub fn shape_of([q, k, v]: &[Tensor; 3]) -> AttnShape {
    let dims = |x: &Tensor| <[usize; 4]>::try_from(x.dims()).unwrap();
    AttnShape::of(dims(q), dims(k), dims(v)).unwrap()
}
