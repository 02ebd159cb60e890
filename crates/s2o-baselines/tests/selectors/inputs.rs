//! Random calls, and the properties that every selector has on a call.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{Attention, AttnShape, BlockSelection, Mask, PrefillCall, dense_attn, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, BlockSparse, Keys, Selection};

use crate::plain::{Compared, PlainHead};

/// A causal call and its tensors.
#[derive(Debug, Clone)]
pub struct Inputs {
    pub shape: AttnShape,
    pub call: PrefillCall,
    pub tensors: [Tensor; 3],
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
    ) -> Inputs {
        let q_len = ((k_len as f64 * chunk) as usize).clamp(1, k_len);
        Inputs::random([batch, q_len, kv_heads * group, 16], [k_len, kv_heads], seed)
    }
}

impl Inputs {
    pub fn new(tensors: [Tensor; 3]) -> Self {
        let [q, k, v] = tensors.each_ref().map(|x| <[usize; 4]>::try_from(x.dims()).unwrap());
        let shape = AttnShape::of(q, k, v).unwrap();
        let softmax_scale = shape.default_softmax_scale();
        Self { shape, call: PrefillCall { layer: 0, softmax_scale, prompt_len: shape.k_len() }, tensors }
    }

    /// q, k, v with locality and a few keys that all queries attend to.
    pub fn random([batch, q_len, heads, dim]: [usize; 4], [k_len, kv_heads]: [usize; 2], seed: u32) -> Self {
        let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut tensor = |len: usize, heads: usize, offset: usize, strong: bool| {
            let mut data = Vec::with_capacity(batch * len * heads * dim);
            for s in (0..batch).flat_map(|_| 0..len) {
                for _ in 0..heads {
                    let turn = (offset + s) as f32 / 150.0;
                    let lift = if strong && (s * 7919 + 13) % 97 == 0 { 6.0 } else { 1.0 };
                    for d in 0..dim {
                        let wave = (turn + d as f32).sin() * 1.5;
                        data.push((draw() + wave) * lift + if d == 0 { lift } else { 0.0 });
                    }
                }
            }
            Tensor::from_vec(data, (batch, len, heads, dim), &Device::Cpu).unwrap()
        };
        let q = tensor(q_len, heads, k_len - q_len, false);
        Self::new([q, tensor(k_len, kv_heads, 0, true), tensor(k_len, kv_heads, 0, false)])
    }

    pub fn select(&self, selector: &impl BlockSelector) -> Selection {
        let [q, k, v] = &self.tensors;
        let selection = selector.select(&self.call, q, k, v).unwrap();
        if selection.reordered.is_none() {
            assert_eq!(lists(&selection).check(&self.shape, Mask::Causal), Ok(()));
        }
        selection
    }

    pub fn in_dtype(&self, dtype: DType) -> Self {
        Self { tensors: self.tensors.each_ref().map(|x| x.to_dtype(dtype).unwrap()), ..self.clone() }
    }

    /// The same tensors, laid out (batch, heads, len, head_dim) in memory, as models have them.
    fn head_major(&self) -> Self {
        let swapped = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
        Self { tensors: self.tensors.each_ref().map(swapped), ..self.clone() }
    }

    /// Head `number` (`b * num_heads + h`).
    pub fn head(&self, number: usize) -> PlainHead {
        let (batch, q_head) = (number / self.shape.num_heads(), number % self.shape.num_heads());
        PlainHead {
            q: head(&self.tensors[0], batch, q_head),
            k: head(&self.tensors[1], batch, self.shape.kv_head(q_head)),
            scale: f64::from(self.call.softmax_scale),
        }
    }

    pub fn num_heads(&self) -> usize {
        self.shape.batch() * self.shape.num_heads()
    }

    /// Compares the lists of every head with `plain`, which gives those of its query blocks; none are not compared.
    pub fn compare(
        &self,
        selection: &Selection,
        mut plain: impl FnMut(usize, &PlainHead) -> Vec<Vec<Option<bool>>>,
    ) -> Compared {
        let (inputs, mut compared) = (self.in_dtype(DType::F32), Compared::default());
        for number in 0..self.num_heads() {
            let rows = plain(number, &inputs.head(number));
            for (i, row) in rows.iter().enumerate() {
                let list = number * rows.len() + i;
                compared.list(&ascending(selection, list), row, &format_args!("head {number}, query block {i}"));
            }
        }
        compared
    }

    /// Density, mean squared error and relative L1 error of a method with one head.
    pub fn measure(&self, selector: impl BlockSelector) -> [f64; 3] {
        let [q, k, v] = &self.tensors;
        let method = BlockSparse::new(selector);
        let out = method.prefill(&self.call, q, k, v).unwrap();
        let density = method.take_work()[&self.call.layer][0].density();
        let dense = self.dense();
        let mean = |x: Tensor| f64::from(x.mean_all().unwrap().to_scalar::<f32>().unwrap());
        let error = (out - &dense).unwrap();
        [density, mean(error.sqr().unwrap()), mean(error.abs().unwrap()) / mean(dense.abs().unwrap())]
    }

    pub fn dense(&self) -> Tensor {
        let [q, k, v] = &self.tensors;
        dense_attn(q, k, v, self.call.softmax_scale, Mask::Causal).unwrap()
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

pub fn greatest_difference(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// Checks that nothing is left out, and that the output is that of dense attention.
pub fn assert_dense<S: BlockSelector>(inputs: &Inputs, selector: S) {
    let [q, k, v] = &inputs.tensors;
    // Half blocks that end with the keys are less than a tile.
    let is_half = lists(&inputs.select(&selector)).blocks.block_k() < 128;
    let ragged = if is_half { 0.5 * query_blocks(&inputs.shape, Mask::Causal).len() as f64 } else { 0.0 };
    let method = BlockSparse::new(selector);
    let out = method.prefill(&inputs.call, q, k, v).unwrap();
    assert!(greatest_difference(&out, &inputs.dense()) < 1e-4);
    let work = &method.take_work()[&inputs.call.layer];
    assert!(work.iter().all(|head| (head.visited - head.causal as f64).abs() <= ragged));
}

/// Checks that other later keys do not change the outputs before them, and that the layout in memory does not matter.
pub fn assert_causal<S: BlockSelector>(inputs: &Inputs, selector: &S) {
    let [q, k, v] = &inputs.tensors;
    let selection = inputs.select(selector);
    let (out, _) = BlockSparse::<S>::attend(&inputs.call, [q, k, v], selection.clone()).unwrap();
    assert_eq!(lists(&inputs.head_major().select(selector)), lists(&selection));
    let rows = inputs.shape.q_len() / 2;
    let seen = inputs.shape.q_offset() + rows;
    let later = |x: &Tensor| {
        let (now, later) = (x.narrow(1, 0, seen).unwrap(), x.narrow(1, seen, inputs.shape.k_len() - seen).unwrap());
        Tensor::cat(&[now, (later * -3.0).unwrap()], 1).unwrap()
    };
    let (other, _) = BlockSparse::<S>::attend(&inputs.call, [q, &later(k), &later(v)], selection).unwrap();
    if rows > 0 {
        let [out, other] = [out, other].map(|x| x.narrow(1, 0, rows).unwrap());
        assert_eq!(greatest_difference(&out, &other), 0.0);
    }
}

/// Half precision: checks that the choice is that of the same numbers in f32, and that the attention runs.
pub fn assert_takes_half_precision(inputs: &Inputs, selector: impl BlockSelector) {
    let method = BlockSparse::new(selector);
    for dtype in [DType::BF16, DType::F16] {
        let half = inputs.in_dtype(dtype);
        let full = half.in_dtype(DType::F32).select(method.selector());
        assert_eq!(lists(&half.select(method.selector())), lists(&full), "{dtype:?}");
        let [q, k, v] = &half.tensors;
        assert_eq!(method.prefill(&inputs.call, q, k, v).unwrap().dtype(), dtype);
    }
}
