//! Shared parts of the tests' plain re-implementations: random calls, one head at a time in f64.

use candle_core::{Device, Tensor};
use candle_s2o::{AttnShape, BlockSelection, PrefillCall};
use proptest::prelude::*;
use s2o_baselines::{Keys, Selection};

/// One causal call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub shape: AttnShape,
    pub seed: u64,
}

prop_compose! {
    /// Whole prompts and chunks, ragged, GQA and batches.
    pub fn calls()(
        batch in 1..=2usize,
        kv_heads in 1..=2usize,
        group in prop_oneof![Just(1usize), Just(2)],
        k_len in 1..2000usize,
        chunk in prop_oneof![Just(1.0f64), 0.0..1.0f64],
        seed in any::<u32>(),
    ) -> Call {
        let q_len = ((k_len as f64 * chunk) as usize).clamp(1, k_len);
        let shape = AttnShape::new([batch, q_len, kv_heads * group, 16], [k_len, kv_heads]).unwrap();
        Call { shape, seed: u64::from(seed) }
    }
}

impl Call {
    /// q, k, v with locality and a few keys that all queries attend to.
    pub fn tensors(&self) -> [Tensor; 3] {
        let shape = &self.shape;
        let dim = shape.head_dim();
        let mut state = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut tensor = |len: usize, heads: usize, offset: usize, strong: bool| {
            let mut data = Vec::with_capacity(shape.batch() * len * heads * dim);
            for _ in 0..shape.batch() {
                for s in 0..len {
                    for _ in 0..heads {
                        let turn = (offset + s) as f32 / 150.0;
                        let lift = if strong && (s * 7919 + 13) % 97 == 0 { 6.0 } else { 1.0 };
                        for d in 0..dim {
                            let wave = (turn + d as f32).sin() * 1.5;
                            data.push((draw() + wave) * lift + if d == 0 { lift } else { 0.0 });
                        }
                    }
                }
            }
            Tensor::from_vec(data, (shape.batch(), len, heads, dim), &Device::Cpu).unwrap()
        };
        [
            tensor(shape.q_len(), shape.num_heads(), shape.q_offset(), false),
            tensor(shape.k_len(), shape.num_kv_heads(), 0, true),
            tensor(shape.k_len(), shape.num_kv_heads(), 0, false),
        ]
    }

    pub fn prefill(&self) -> PrefillCall {
        let softmax_scale = self.shape.default_softmax_scale();
        PrefillCall { layer: 0, softmax_scale, prompt_len: self.shape.k_len() }
    }
}

/// `rows[i][d]` of one head, in f64.
pub fn head(x: &Tensor, batch: usize, head: usize) -> Vec<Vec<f64>> {
    let rows = x.get(batch).unwrap().narrow(1, head, 1).unwrap().squeeze(1).unwrap();
    let rows = rows.to_vec2::<f32>().unwrap();
    rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect()
}

/// The selection of a method on the CPU.
pub fn lists(selection: &Selection) -> &BlockSelection {
    match &selection.keys {
        Keys::Lists(lists) => lists,
        Keys::Mask(mask) => panic!("expected lists, got a mask on {:?}", mask.tensor().device()),
    }
}

/// The key blocks of list `list` in ascending order.
pub fn ascending(selection: &Selection, list: usize) -> Vec<usize> {
    lists(selection).blocks.list(list).iter().rev().map(|&block| block as usize).collect()
}
