//! PBS-Attn against its definition.

use candle_core::{Device, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q};
use proptest::prelude::*;
use s2o_baselines::{BlockSparse, Pbs, PbsScore, Reordered, Selection};

use crate::inputs::{Inputs, ascending, assert_dense, assert_takes_half_precision, calls, head};
use crate::plain::{Compared, TIE, mean, top_cdf};
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

/// The call with values that show their origin.
fn with_positions_as_values(inputs: &Inputs) -> Inputs {
    let [q, k, _] = &inputs.tensors;
    let (batch, k_len, heads, dim) = k.dims4().unwrap();
    let positions = Tensor::arange(0f32, k_len as f32, &Device::Cpu).unwrap().reshape((1, k_len, 1, 1)).unwrap();
    let values = positions.broadcast_as((batch, k_len, heads, dim)).unwrap().contiguous().unwrap();
    Inputs { tensors: [q.clone(), k.clone(), values], ..inputs.clone() }
}

/// The positions of the keys as the selection lays them out, for query head `q_head`.
fn layout(selection: &Selection, shape: &AttnShape, batch: usize, q_head: usize) -> Vec<usize> {
    let Some(reordered) = &selection.reordered else { return (0..shape.k_len()).collect() };
    let heads = reordered.v.dim(2).unwrap();
    let rows = head(&reordered.v, batch, q_head * heads / shape.num_heads());
    rows.iter().map(|row| row[0] as usize).collect()
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
            let tied = before - behind >= -TIE * behind.abs() - 1e-37;
            assert!(tied, "{pair:?}: {before} before {behind}");
        }
    }
}

/// Compares the order and every list of a call.
pub fn compare(inputs: &Inputs, options: Options) -> Compared {
    let inputs = with_positions_as_values(inputs);
    let shape = &inputs.shape;
    let selection = inputs.select(&options.method());
    let group = if options.shared_order { shape.num_heads() / shape.num_kv_heads() } else { 1 };
    inputs.compare(&selection, |number, head| {
        let layout = layout(&selection, shape, number / shape.num_heads(), number % shape.num_heads());
        let before = layout.len() - shape.k_len();
        // All whole segments except the last queries' own.
        assert_eq!(before, (shape.k_len() - 1) / options.segment * options.segment);
        assert!(layout[before..].iter().copied().eq(0..shape.k_len()));
        let of_group = number / group * group..number / group * group + group;
        let s: Vec<_> = of_group.map(|number| inputs.head(number).last_queries(128).0).collect();
        assert_ordered(&layout[..before], &mean(&s), options.segment);

        let reordered: Vec<_> = layout[..before].iter().map(|&key| head.k[key].clone()).collect();
        let first_key = layout[..before].iter().position(|&key| key == 0).map(|place| place / BLOCK_Q);
        let rows = head.query_blocks().map(|(diagonal, rows)| {
            let own = (head.offset() + rows.start) / options.segment * options.segment;
            let scores = match options.score {
                PbsScore::MeanPooled => head.pooled_row(rows, &reordered[..own]),
                PbsScore::Antidiagonal => block_row(head, &reordered[..own], rows, 16, |_| own / 16),
            };
            let mut plain = top_cdf(&scores, |_| false, options.share);
            if let Some(first_key) = first_key.filter(|&block| block * BLOCK_Q < own) {
                plain[first_key] = Some(true);
            }
            plain.resize(before / BLOCK_Q, Some(false));
            plain.extend((0..=diagonal).map(|block| Some(block * BLOCK_Q >= own)));
            plain
        });
        rows.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn orders_and_chooses_as_defined(call in calls(), options in options()) {
        compare(&call, options).assert_decided(5, 200);
    }

    #[test]
    fn everything_is_dense(call in calls(), options in options()) {
        assert_dense(&call, options.method().threshold(1.0).unwrap());
    }

    #[test]
    fn half_precision(call in calls(), options in options()) {
        assert_takes_half_precision(&call, options.method());
    }

    /// With a fixed order and fixed lists, later tokens never change the output of a query.
    #[test]
    fn later_keys_and_values_are_not_seen(call in calls(), options in options(), at in 0.0..1.0f64) {
        let Inputs { shape, tensors: [q, k, v], .. } = &call;
        let shown = with_positions_as_values(&call);
        let selection = shown.select(&options.method());
        let keys = selection.reordered.as_ref().map_or(k, |reordered| &reordered.k);
        let positions = selection.reordered.as_ref().map_or(&shown.tensors[2], |reordered| &reordered.v);
        let row = (at * shape.q_len() as f64) as usize;
        let later = positions.ge((shape.q_offset() + row + 1) as f32).unwrap();
        let out = |poison: f32| {
            let poison = Tensor::full(poison, keys.shape(), &Device::Cpu).unwrap();
            let [poisoned_k, poisoned_v] = [keys, positions].map(|x| later.where_cond(&poison, x).unwrap());
            let reordered = Some(Reordered { k: poisoned_k, v: poisoned_v });
            let held = Selection { keys: selection.keys.clone(), reordered };
            let (out, _) = BlockSparse::<Pbs>::attend(&call.call, [q, k, v], held).unwrap();
            out.narrow(1, 0, row + 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        prop_assert_eq!(out(1e4), out(-3.0));
    }
}

#[test]
fn long_prompts_in_parts() {
    // The attention of the last queries of all heads is more than one part can hold.
    let options = Options::published(PbsScore::MeanPooled);
    compare(&Inputs::random([1, 150, 4, 16], [140_000, 2], 7), options).assert_decided(5, 200);
}

#[test]
fn one_segment_is_dense() {
    let selection = Inputs::random([1, 256, 2, 16], [256, 1], 3).select(&Pbs::default());
    assert!(selection.reordered.is_none());
    assert_eq!((0..4).map(|list| ascending(&selection, list)).collect::<Vec<_>>(), [&[0][..], &[0, 1], &[0], &[0, 1]]);
}

#[test]
fn a_shared_order_copies_no_kv_head() {
    let inputs = Inputs::random([1, 700, 4, 16], [700, 2], 5);
    for (shared_order, heads) in [(false, 4), (true, 2)] {
        let reordered = inputs.select(&Pbs::default().shared_order(shared_order)).reordered.unwrap();
        assert_eq!(reordered.k.dims(), [1, 512 + 700, heads, 16]);
        assert_eq!(reordered.v.dims(), reordered.k.dims());
    }
}
