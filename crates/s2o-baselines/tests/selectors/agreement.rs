//! Shared parts of the tests: definitions in f64, one head at a time, and the comparison with a selection.
//!
//! A selector computes scores in f32, so its choice may differ from the f64 choice for scores within rounding of the
//! threshold. A plain re-implementation therefore says of every entry whether it MUST be chosen or MAY be.

use candle_core::{DType, Tensor};
use candle_s2o::{AttnShape, BLOCK_Q, Mask, PrefillCall, dense_attn, query_blocks};
use s2o_baselines::{BlockSelector, BlockSparse, Selection};

use crate::plain::{Call, ascending, head, lists};

/// Scores this close, relative to each other, may change places.
const TIE: f64 = 2e-4;
/// Rounding of a sum of scores, relative to their total.
const SUM: f64 = 2e-5;
/// Scores below this are zero in f32.
const ZERO: f64 = 1e-30;

/// A call and its tensors.
#[derive(Debug, Clone)]
pub struct Inputs {
    pub shape: AttnShape,
    pub call: PrefillCall,
    pub tensors: [Tensor; 3],
}

impl From<Call> for Inputs {
    fn from(call: Call) -> Self {
        Self { shape: call.shape, call: call.prefill(), tensors: call.tensors() }
    }
}

impl Inputs {
    pub fn select(&self, selector: &impl BlockSelector) -> Selection {
        let [q, k, v] = &self.tensors;
        let selection = selector.select(&self.call, q, k, v).unwrap();
        assert_eq!(lists(&selection).check(&self.shape, Mask::Causal), Ok(()));
        selection
    }

    pub fn in_bf16(&self) -> Self {
        let tensors = self.tensors.each_ref().map(|x| x.to_dtype(DType::BF16).unwrap());
        Self { tensors, ..self.clone() }
    }

    /// The same tensors, laid out (batch, heads, len, head_dim) in memory, as models have them.
    pub fn head_major(&self) -> Self {
        let swapped = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
        Self { tensors: self.tensors.each_ref().map(swapped), ..self.clone() }
    }

    /// The same numbers in f32.
    pub fn in_f32(&self) -> Self {
        let tensors = self.tensors.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
        Self { tensors, ..self.clone() }
    }

    /// (batch, head) of the lists' heads, in order.
    pub fn heads(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let heads = self.shape.num_heads();
        (0..self.shape.batch() * heads).map(move |i| (i / heads, i % heads))
    }

    pub fn head(&self, (batch, number): (usize, usize)) -> PlainHead {
        let kv_head = number / (self.shape.num_heads() / self.shape.num_kv_heads());
        PlainHead {
            q: head(&self.tensors[0], batch, number),
            k: head(&self.tensors[1], batch, kv_head),
            scale: f64::from(self.call.softmax_scale),
        }
    }
}

/// Which entries must be chosen, and which may.
#[derive(Debug, Clone)]
pub struct Bracket {
    pub must: Vec<bool>,
    pub may: Vec<bool>,
}

impl Bracket {
    /// The entries in descending order until their sum reaches the share of the total.
    pub fn top_cdf(scores: &[f64], share: f64) -> Self {
        let sorted = descending(scores);
        let mut sums = vec![0.0];
        sums.extend(sorted.iter().scan(0.0, |sum, score| {
            *sum += score;
            Some(*sum)
        }));
        let total = sums[sorted.len()];
        let decided = scores.iter().map(|&score| {
            let (above, tied) = ranks(&sorted, score);
            // Always chosen if the entries before it, including its ties, do not reach the share.
            (sums[tied] - score < (share - SUM) * total, sums[above] < (share + SUM) * total)
        });
        let (must, may) = decided.unzip();
        Self { must, may }
    }

    /// The greatest entries, at least `counts.0` and at most `counts.1` of them.
    pub fn top_k(scores: &[f64], counts: (usize, usize)) -> Self {
        let scores: Vec<f64> = scores.iter().map(|&score| if score < ZERO { 0.0 } else { score }).collect();
        let sorted = descending(&scores);
        let decided = scores.iter().map(|&score| {
            let (above, tied) = ranks(&sorted, score);
            (tied <= counts.0, above < counts.1)
        });
        let (must, may) = decided.unzip();
        Self { must, may }
    }

    /// The least and greatest number of entries that reach the share.
    pub fn count_to(scores: &[f64], share: f64) -> (usize, usize) {
        let total: f64 = scores.iter().sum();
        let sorted = descending(scores);
        let count = |wanted: f64| {
            let mut sum = 0.0;
            sorted
                .iter()
                .take_while(|&&x| {
                    let short = sum < wanted * total;
                    sum += x;
                    short
                })
                .count()
        };
        (count(share - SUM), count(share + SUM))
    }
}

fn descending(scores: &[f64]) -> Vec<f64> {
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted
}

/// The number of entries that are certainly greater than a score, and of those that are not certainly less.
fn ranks(descending: &[f64], score: f64) -> (usize, usize) {
    let above = descending.partition_point(|&other| other > score * (1.0 + TIE));
    let tied = descending.partition_point(|&other| other >= score * (1.0 - TIE));
    (above, tied)
}

/// One head.
pub struct PlainHead {
    pub q: Vec<Vec<f64>>,
    pub k: Vec<Vec<f64>>,
    pub scale: f64,
}

impl PlainHead {
    pub fn offset(&self) -> usize {
        self.k.len() - self.q.len()
    }

    /// Softmax attention of one query to all keys.
    pub fn attention(&self, row: usize) -> Vec<f64> {
        let seen = self.offset() + row + 1;
        let scores = self.k[..seen].iter().map(|key| self.scale * dot(&self.q[row], key));
        let mut attention = softmax(&scores.collect::<Vec<_>>());
        attention.resize(self.k.len(), 0.0);
        attention
    }

    /// The mean share of each key, and of each distance, in the attention of the last `count` queries.
    pub fn last_queries(&self, count: usize) -> (Vec<f64>, Vec<f64>) {
        let first = self.q.len().saturating_sub(count);
        let (mut keys, mut distances) = (vec![0.0; self.k.len()], vec![0.0; self.k.len()]);
        let share = 1.0 / (self.q.len() - first) as f64;
        for row in first..self.q.len() {
            for (key, mass) in self.attention(row).into_iter().enumerate().take(self.offset() + row + 1) {
                keys[key] += mass * share;
                distances[self.offset() + row - key] += mass * share;
            }
        }
        (keys, distances)
    }

    /// The query blocks: number by absolute position, and rows.
    pub fn query_blocks(&self) -> Vec<(usize, Vec<usize>)> {
        let mut blocks: Vec<(usize, Vec<usize>)> = Vec::new();
        for row in 0..self.q.len() {
            let block = (self.offset() + row) / BLOCK_Q;
            match blocks.last_mut() {
                Some((last, rows)) if *last == block => rows.push(row),
                _ => blocks.push((block, vec![row])),
            }
        }
        blocks
    }

    /// For each query block, the softmax over key blocks of 128 of the products of means.
    pub fn pooled(&self) -> Vec<Vec<f64>> {
        let keys: Vec<Vec<f64>> = self.k.chunks(BLOCK_Q).map(mean).collect();
        let pooled = self.query_blocks().into_iter().map(|(block, rows)| {
            let rows: Vec<_> = rows.into_iter().map(|row| self.q[row].clone()).collect();
            let query = mean(&rows);
            let scores: Vec<f64> = keys[..=block].iter().map(|key| self.scale * dot(&query, key)).collect();
            let mut row = softmax(&scores);
            row.resize(keys.len(), 0.0);
            row
        });
        pooled.collect()
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn mean(rows: &[Vec<f64>]) -> Vec<f64> {
    (0..rows[0].len()).map(|d| rows.iter().map(|row| row[d]).sum::<f64>() / rows.len() as f64).collect()
}

pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Sums over blocks of 128.
pub fn block_sums(x: &[f64]) -> Vec<f64> {
    x.chunks(BLOCK_Q).map(|block| block.iter().sum()).collect()
}

/// Compares the lists of a head with `expected`, which gives (must, may) for (query block, key block). Returns the
/// number of undecided entries.
pub fn assert_blocks(
    inputs: &Inputs,
    selection: &Selection,
    head: usize,
    expected: impl Fn(usize, usize) -> (bool, bool),
) -> usize {
    let shape = &inputs.shape;
    let block_k = lists(selection).blocks.block_k();
    let rows = query_blocks(shape, Mask::Causal).len();
    let mut undecided = 0;
    for i in 0..rows {
        let query_block = shape.q_offset() / BLOCK_Q + i;
        let got = ascending(selection, head * rows + i);
        let causal = ((query_block + 1) * BLOCK_Q).min(shape.k_len()).div_ceil(block_k);
        for key_block in 0..causal {
            let (must, may) = expected(i, key_block);
            let chosen = got.binary_search(&key_block).is_ok();
            assert!(!must || chosen, "head {head}: query block {query_block} misses {key_block}: {got:?}");
            assert!(may || !chosen, "head {head}: query block {query_block} has {key_block}: {got:?}");
            undecided += usize::from(must != may);
        }
    }
    undecided
}

/// Checks that nothing is left out, and that the output is that of dense attention.
pub fn assert_dense<S: BlockSelector>(inputs: &Inputs, selector: S) {
    let [q, k, v] = &inputs.tensors;
    let selection = inputs.select(&selector);
    let (out, work) = BlockSparse::<S>::attend(&inputs.call, [q, k, v], selection).unwrap();
    // Half blocks that end with the keys are less than a tile.
    let ragged = 0.5 * query_blocks(&inputs.shape, Mask::Causal).len() as f64;
    assert!(work.iter().all(|head| head.visited >= head.causal as f64 - ragged));
    let dense = dense_attn(q, k, v, inputs.call.softmax_scale, Mask::Causal).unwrap();
    assert!(greatest_difference(&out, &dense) < 1e-4);
}

pub fn greatest_difference(a: &Tensor, b: &Tensor) -> f32 {
    let [a, b] = [a, b].map(|x| x.to_dtype(DType::F32).unwrap());
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
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
