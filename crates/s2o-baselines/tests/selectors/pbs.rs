//! PBS-Attn against its definition.

use candle_core::{Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, Mask, PrefillCall, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, BlockSparse, Pbs, PbsScore, Reordered, Selection};

use crate::plain::{Call, ascending, calls, head};
use crate::plain_cdf::{
    Compared, ROUNDING, assert_dense, assert_takes_half_precision, choice, dot, mean, shape_of, softmax,
};
use crate::xattention::block_row;

/// The options to compare: the selector does not show its own.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub segment: usize,
    pub share: f64,
    pub score: PbsScore,
    pub shared_order: bool,
}

impl Options {
    pub fn published(score: PbsScore) -> Self {
        Self { segment: 256, share: 0.9, score, shared_order: false }
    }

    pub fn method(&self) -> Pbs {
        let method = Pbs::default().segment(self.segment).unwrap().threshold(self.share).unwrap();
        method.score(self.score).shared_order(self.shared_order)
    }
}

fn options() -> impl Strategy<Value = Options> {
    let score = prop_oneof![Just(PbsScore::MeanPooled), Just(PbsScore::Antidiagonal)];
    let segment = prop_oneof![3 => Just(256usize), 1 => Just(128), 1 => Just(384), 1 => Just(1024)];
    (segment, 0.05..0.99f64, score, any::<bool>()).prop_map(|(segment, share, score, shared_order)| Options {
        segment,
        share,
        score,
        shared_order,
    })
}

/// Values that show their origin.
fn positions_as_values(k: &Tensor) -> Tensor {
    let (batch, k_len, heads, dim) = k.dims4().unwrap();
    let positions = Tensor::arange(0f32, k_len as f32, &Device::Cpu).unwrap().reshape((1, k_len, 1, 1)).unwrap();
    positions.broadcast_as((batch, k_len, heads, dim)).unwrap().contiguous().unwrap()
}

/// The positions of the keys as the selection lays them out, for query head `q_head`.
fn layout(selection: &Selection, shape: &AttnShape, batch: usize, q_head: usize) -> Vec<usize> {
    let Some(reordered) = &selection.reordered else { return (0..shape.k_len()).collect() };
    let heads = reordered.v.dim(2).unwrap();
    let rows = head(&reordered.v, batch, q_head * heads / shape.num_heads());
    rows.iter().map(|row| row[0] as usize).collect()
}

/// s of one query head.
fn attention_of_last_block(queries: &[Vec<f64>], keys: &[Vec<f64>], scale: f64) -> Vec<f64> {
    let rows: Vec<_> = queries
        .iter()
        .enumerate()
        .skip(queries.len().saturating_sub(128))
        .map(|(row, query)| {
            let seen = keys.len() - queries.len() + row + 1;
            let logits: Vec<_> =
                keys.iter().enumerate().map(|(i, key)| (i < seen).then(|| scale * dot(query, key))).collect();
            softmax(&logits)
        })
        .collect();
    mean(&rows)
}

/// Checks that the order is by segment, descending in s. Keys whose s differ only by rounding may have any order.
fn assert_ordered(layout: &[usize], s: &[f64], segment: usize) {
    for (first, keys) in layout.chunks(segment).enumerate().map(|(i, keys)| (i * segment, keys)) {
        let mut all = keys.to_vec();
        all.sort_unstable();
        assert!(all.iter().copied().eq(first..first + segment));
        for pair in keys.windows(2) {
            let (before, behind) = (s[pair[0]], s[pair[1]]);
            // The smallest normal f32 is about 1e-38.
            let tied = before - behind >= -ROUNDING * behind.abs() - 1e-37;
            assert!(tied, "{pair:?}: {before} before {behind}");
        }
    }
}

/// Compares the order and every list of a call.
pub fn compare(call: &PrefillCall, [q, k, _]: &[Tensor; 3], options: Options) -> Compared {
    let tensors = [q.clone(), k.clone(), positions_as_values(k)];
    let shape = shape_of(&tensors);
    let selection = options.method().select(call, q, k, &tensors[2]).unwrap();
    let (scale, offset) = (f64::from(call.softmax_scale), shape.q_offset());
    let cut: Vec<_> = query_blocks(&shape, Mask::Causal).collect();
    let group = shape.num_heads() / shape.num_kv_heads();
    let mut compared = Compared::default();
    for at in 0..shape.batch() * shape.num_heads() {
        let (batch, q_head) = (at / shape.num_heads(), at % shape.num_heads());
        let (queries, keys) = (head(q, batch, q_head), head(k, batch, shape.kv_head(q_head)));
        let layout = layout(&selection, &shape, batch, q_head);
        let before = layout.len() - shape.k_len();
        // All whole segments except the last queries' own.
        assert_eq!(before, (shape.k_len() - 1) / options.segment * options.segment);
        assert!(layout[before..].iter().copied().eq(0..shape.k_len()));
        let ordering_heads = if options.shared_order {
            q_head / group * group..q_head / group * group + group
        } else {
            q_head..q_head + 1
        };
        let s = ordering_heads.map(|q_head| attention_of_last_block(&head(q, batch, q_head), &keys, scale));
        assert_ordered(&layout[..before], &mean(&s.collect::<Vec<_>>()), options.segment);

        let reordered: Vec<_> = layout[..before].iter().map(|&key| keys[key].clone()).collect();
        let first_key = layout[..before].iter().position(|&key| key == 0).map(|place| place / BLOCK_Q);
        for (i, rows) in cut.iter().enumerate() {
            let own = (offset + rows.start) / options.segment * options.segment;
            let scores = match options.score {
                PbsScore::MeanPooled => {
                    let query = mean(&queries[rows.clone()]);
                    let blocks = reordered[..own].chunks(BLOCK_Q);
                    softmax(&blocks.map(|block| Some(scale * dot(&query, &mean(block)))).collect::<Vec<_>>())
                }
                PbsScore::Antidiagonal => {
                    let place = (offset, rows.clone());
                    block_row(&queries, &reordered[..own], place, (16, scale), |_| own / 16)
                }
            };
            let mut plain = choice(&scores, &vec![false; scores.len()], options.share);
            if let Some(first_key) = first_key.filter(|&block| block * BLOCK_Q < own) {
                plain[first_key] = Some(true);
            }
            plain.resize(before / BLOCK_Q, Some(false));
            let diagonal = (offset + rows.start) / BLOCK_Q;
            plain.extend((0..=diagonal).map(|block| Some(block * BLOCK_Q >= own)));
            compared.list(&selection, at * cut.len() + i, &plain);
        }
    }
    compared
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn orders_and_chooses_as_defined(call in calls(), options in options()) {
        compare(&call.prefill(), &call.tensors(), options).assert_decided();
    }

    #[test]
    fn everything_is_dense(call in calls(), options in options()) {
        assert_dense(options.method().threshold(1.0).unwrap(), &call.prefill(), &call.tensors());
    }

    #[test]
    fn half_precision(call in calls(), options in options()) {
        assert_takes_half_precision(options.method(), &call.prefill(), &call.tensors());
    }

    /// With a fixed order and fixed lists, later tokens never change the output of a query.
    #[test]
    fn later_keys_and_values_are_not_seen(call in calls(), options in options(), at in 0.0..1.0f64) {
        let [q, k, v] = call.tensors();
        let shape = &call.shape;
        let selection = options.method().select(&call.prefill(), &q, &k, &positions_as_values(&k)).unwrap();
        let keys = selection.reordered.as_ref().map_or(&k, |reordered| &reordered.k);
        let positions = selection.reordered.as_ref().map_or_else(|| positions_as_values(&k), |all| all.v.clone());
        let row = (at * shape.q_len() as f64) as usize;
        let later = positions.ge((shape.q_offset() + row + 1) as f32).unwrap();
        let out = |poison: f32| {
            let poison = Tensor::full(poison, keys.shape(), &Device::Cpu).unwrap();
            let [poisoned_k, poisoned_v] = [keys, &positions].map(|x| later.where_cond(&poison, x).unwrap());
            let reordered = Some(Reordered { k: poisoned_k, v: poisoned_v });
            let held = Selection { keys: selection.keys.clone(), reordered };
            let (out, _) = BlockSparse::<Pbs>::attend(&call.prefill(), [&q, &k, &v], held).unwrap();
            out.narrow(1, 0, row + 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        prop_assert_eq!(out(1e4), out(-3.0));
    }
}

#[test]
fn long_prompts_in_parts() {
    // The attention of the last queries is more than one part can hold, even for one head.
    let call = Call { shape: AttnShape::new([1, 150, 4, 16], [140_000, 2]).unwrap(), seed: 7 };
    let options = Options::published(PbsScore::MeanPooled);
    compare(&call.prefill(), &call.tensors(), options).assert_decided();
}

#[test]
fn one_segment_is_dense() {
    let call = Call { shape: AttnShape::new([1, 256, 2, 16], [256, 1]).unwrap(), seed: 3 };
    let [q, k, v] = call.tensors();
    let selection = Pbs::default().select(&call.prefill(), &q, &k, &v).unwrap();
    assert!(selection.reordered.is_none());
    assert_eq!((0..4).map(|list| ascending(&selection, list)).collect::<Vec<_>>(), [&[0][..], &[0, 1], &[0], &[0, 1]]);
}

#[test]
fn a_shared_order_copies_no_kv_head() {
    let call = Call { shape: AttnShape::new([1, 700, 4, 16], [700, 2]).unwrap(), seed: 5 };
    let [q, k, v] = call.tensors();
    for (shared_order, heads) in [(false, 4), (true, 2)] {
        let method = Pbs::default().shared_order(shared_order);
        let reordered = method.select(&call.prefill(), &q, &k, &v).unwrap().reordered.unwrap();
        assert_eq!(reordered.k.dims(), [1, 512 + 700, heads, 16]);
        assert_eq!(reordered.v.dims(), reordered.k.dims());
    }
}

#[test]
fn options_out_of_range_are_refused() {
    for segment in [0, 64, 200, 16384] {
        let error = Pbs::default().segment(segment).unwrap_err();
        assert_eq!(error.to_string(), format!("pbs: segment: expected a multiple of 128 up to 8192, got {segment}"));
    }
    let error = Pbs::default().threshold(0.0).unwrap_err();
    assert_eq!(error.to_string(), "pbs: threshold: expected a share above 0 up to 1, got 0");
}
