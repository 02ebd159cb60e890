//! Definitions in f64, one head at a time.
//!
//! A selector computes scores in f32, so its choice may differ from the f64 choice for scores within rounding of the
//! threshold. A plain re-implementation says of every entry whether it is chosen, or `None` if rounding decides.

use std::fmt::Display;
use std::ops::Range;

use candle_s2o::BLOCK_Q;

/// Scores this close, relative to each other, may change places: about 1e-5 in f32 for a logit of 100.
pub const TIE: f64 = 2e-4;
/// Rounding of a sum of scores, relative to their total.
const SUM: f64 = 2e-5;
/// Scores below this are zero in f32.
const ZERO: f64 = 1e-30;

/// The entries in descending order until their sum reaches the share of the total, those of `kept` counted first.
pub fn top_cdf(scores: &[f64], kept: impl Fn(usize) -> bool, share: f64) -> Vec<Option<bool>> {
    let total: f64 = scores.iter().sum();
    let (first, others): (Vec<usize>, Vec<usize>) = (0..scores.len()).partition(|&i| kept(i));
    let sorted = descending(others.iter().map(|&i| scores[i]));
    let mut sums = vec![first.iter().map(|&i| scores[i]).sum::<f64>()];
    sums.extend(sorted.iter().scan(sums[0], |sum, score| {
        *sum += score;
        Some(*sum)
    }));
    let decide = |i: usize| {
        let (above, tied) = ranks(&sorted, scores[i]);
        match () {
            // Chosen if the entries before it, including its ties, do not reach the share.
            () if kept(i) || sums[tied] - scores[i] < (share - SUM) * total => Some(true),
            () if sums[above] >= (share + SUM) * total => Some(false),
            () => None,
        }
    };
    (0..scores.len()).map(decide).collect()
}

/// The greatest entries, at least `counts.0` and at most `counts.1` of them.
pub fn top_k(scores: &[f64], counts: (usize, usize)) -> Vec<Option<bool>> {
    let scores: Vec<f64> = scores.iter().map(|&score| if score < ZERO { 0.0 } else { score }).collect();
    let sorted = descending(scores.iter().copied());
    let decide = |&score: &f64| {
        let (above, tied) = ranks(&sorted, score);
        if tied <= counts.0 { Some(true) } else { (above >= counts.1).then_some(false) }
    };
    scores.iter().map(decide).collect()
}

/// The least and greatest number of entries that reach the share.
pub fn count_to(scores: &[f64], share: f64) -> (usize, usize) {
    let total: f64 = scores.iter().sum();
    let sorted = descending(scores.iter().copied());
    let count = |wanted: f64| {
        let mut sum = 0.0;
        let short = |&&x: &&f64| {
            let short = sum < wanted * total;
            sum += x;
            short
        };
        sorted.iter().take_while(short).count()
    };
    (count(share - SUM), count(share + SUM))
}

/// Whether any of the choices takes an entry.
pub fn any(choices: impl IntoIterator<Item = Option<bool>>) -> Option<bool> {
    let mut open = false;
    for choice in choices {
        match choice {
            Some(true) => return choice,
            Some(false) => {}
            None => open = true,
        }
    }
    (!open).then_some(false)
}

fn descending(scores: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = scores.collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted
}

/// The number of entries that are certainly greater than a score, and of those that are not certainly less.
fn ranks(descending: &[f64], score: f64) -> (usize, usize) {
    let above = descending.partition_point(|&other| other > score * (1.0 + TIE));
    let tied = descending.partition_point(|&other| other >= score * (1.0 - TIE));
    (above, tied)
}

/// The number of entries compared, and of those that rounding decides.
#[derive(Debug, Default, Clone, Copy)]
pub struct Compared {
    pub all: usize,
    pub open: usize,
}

impl Compared {
    /// Checks that `chosen` (ascending) are the entries that `plain` chooses.
    pub fn list(&mut self, chosen: &[usize], plain: &[Option<bool>], place: &dyn Display) {
        assert!(chosen.iter().all(|&entry| entry < plain.len()), "{place}: {chosen:?} of {}", plain.len());
        for (entry, expected) in plain.iter().enumerate() {
            let got = chosen.binary_search(&entry).is_ok();
            assert!(expected.is_none_or(|expected| expected == got), "{place}: {entry} in {chosen:?} is wrong");
            self.open += usize::from(expected.is_none());
        }
        self.all += plain.len();
    }

    /// Checks that rounding decides at most a few, and one in `one_in`; otherwise the comparison would say nothing.
    pub fn assert_decided(&self, few: usize, one_in: usize) {
        assert!(self.open <= few + self.all / one_in, "{self:?}");
    }
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
    pub fn query_blocks(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (offset, end) = (self.offset(), self.k.len());
        (offset / BLOCK_Q..end.div_ceil(BLOCK_Q)).map(move |block| {
            let positions = (block * BLOCK_Q).max(offset)..((block + 1) * BLOCK_Q).min(end);
            (block, positions.start - offset..positions.end - offset)
        })
    }

    /// Softmax over blocks of 128 of `keys` of the products of means with the query block of `rows`.
    pub fn pooled_row(&self, rows: Range<usize>, keys: &[Vec<f64>]) -> Vec<f64> {
        let query = mean(&self.q[rows]);
        softmax(&keys.chunks(BLOCK_Q).map(|keys| self.scale * dot(&query, &mean(keys))).collect::<Vec<_>>())
    }

    /// The softmax for each query block, over the key blocks that it sees.
    pub fn pooled(&self) -> Vec<Vec<f64>> {
        let seen = |block: usize| &self.k[..((block + 1) * BLOCK_Q).min(self.k.len())];
        self.query_blocks().map(|(block, rows)| self.pooled_row(rows, seen(block))).collect()
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
