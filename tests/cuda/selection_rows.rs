//! The kernels with which selectors choose blocks, against plain loops in f64.

use candle_core::{DType, Device, Tensor};
use s2o_baselines::cuda::{block_pool, row_softmax};
use s2o_baselines::{RowChoice, Select};

use crate::Runner;
use crate::problem::{Memory, Problem, Sizes, noise};

fn f64s(x: &Tensor) -> Vec<f64> {
    x.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

/// Checks means and self-similarity of a problem's keys, in blocks of `block` keys from position `offset` on.
fn pooled(problem: &Problem, offset: usize, block: usize, centred: bool) {
    let (on_cpu, on_gpu) = (&problem.on_cpu[1], &problem.on_gpu[1]);
    let (batch, len, heads, dim) = on_cpu.dims4().unwrap();
    let centre = Tensor::from_vec(noise(batch * heads * dim, 5), (batch, heads, dim), &Device::Cpu).unwrap();
    let on_device = centre.to_device(on_gpu.device()).unwrap();
    let (means, similarity) = block_pool(on_gpu, offset, block, centred.then_some(&on_device), true).unwrap();
    let (alone, _) = block_pool(on_gpu, offset, block, centred.then_some(&on_device), false).unwrap();
    let blocks = (offset + len).div_ceil(block) - offset / block;
    assert_eq!(means.dims(), [batch, heads, blocks, dim]);
    let (means, self_similarity) = (f64s(&means), f64s(&similarity.unwrap()));
    assert_eq!(f64s(&alone), means, "with and without similarity");
    let (x, centre) = (f64s(on_cpu), f64s(&centre));
    for of_head in 0..batch * heads {
        let (sequence, head) = (of_head / heads, of_head % heads);
        for number in 0..blocks {
            let start = ((offset / block + number) * block).saturating_sub(offset);
            let end = ((offset / block + number + 1) * block - offset).min(len);
            let (mut mean, mut unit) = (vec![0.0; dim], vec![0.0; dim]);
            for token in start..end {
                let at = ((sequence * len + token) * heads + head) * dim;
                let shift = |d: usize| if centred { centre[of_head * dim + d] } else { 0.0 };
                let token: Vec<f64> = (0..dim).map(|d| x[at + d] - shift(d)).collect();
                let norm = token.iter().map(|x| x * x).sum::<f64>().sqrt();
                for d in 0..dim {
                    mean[d] += token[d] / (end - start) as f64;
                    unit[d] += token[d] / norm / (end - start) as f64;
                }
            }
            let at = of_head * blocks + number;
            for d in 0..dim {
                let error = (means[at * dim + d] - mean[d]).abs();
                assert!(error < 1e-5, "head {of_head} block {number}: {error} off in {d}");
            }
            let error = (self_similarity[at] - unit.iter().map(|x| x * x).sum::<f64>()).abs();
            assert!(error < 1e-5, "head {of_head} block {number}: similarity {error} off");
        }
    }
}

/// Rows of a choice with all operands, on the host.
struct Rows {
    rows: usize,
    row_len: usize,
    scores: Vec<f32>,
    bounds: Vec<u32>,
    scored: Vec<u8>,
    forced: Vec<u8>,
    select_all: Vec<u8>,
    enabled: Vec<u8>,
}

/// The operands and options in use.
#[derive(Debug, Clone, Copy, Default)]
struct Given {
    softmax: bool,
    bounds: bool,
    scored: bool,
    forced: bool,
    forced_count_first: bool,
    select_all: bool,
    enabled: bool,
    merge_pairs: bool,
}

const SCALE: f32 = 1.3;
/// Relative error of f32 sums.
const ROUNDING: f64 = 1e-5;

impl Rows {
    /// Scores with the spread of a softmax, with zeros and equal entries.
    fn new(rows: usize, row_len: usize) -> Self {
        let draws = |len: usize, seed: u64| noise(len, seed + row_len as u64).into_iter().map(|x| x + 0.5);
        let few = |len: usize, seed: u64, limit: f32| draws(len, seed).map(|x| u8::from(x < limit)).collect();
        let scores = draws(rows * row_len, 1).enumerate().map(|(i, x)| match i % 11 {
            0 => 0.0,
            3 => 1.25,
            _ => (x * 12.0).exp(),
        });
        let bounds = draws(rows, 2).zip(draws(rows, 3)).flat_map(|(seen, from)| {
            let [seen, from] = [seen, from].map(|x| (x * (row_len + 1) as f32) as u32);
            [seen, 1, from, from + 2]
        });
        Self {
            rows,
            row_len,
            scores: scores.collect(),
            bounds: bounds.collect(),
            scored: few(rows * row_len, 4, 0.6),
            forced: few(rows * row_len, 5, 0.2),
            select_all: few(rows, 6, 0.2),
            enabled: few(rows, 7, 0.7),
        }
    }

    /// The scores as input of the softmax.
    fn logits(&self) -> Vec<f32> {
        self.scores.iter().map(|x| x.max(1e-3).ln()).collect()
    }

    fn seen(&self, row: usize, column: usize, given: Given) -> bool {
        !given.bounds || column < self.bounds[4 * row] as usize
    }

    fn scores_entry(&self, row: usize, column: usize, given: Given) -> bool {
        self.seen(row, column, given) && (!given.scored || self.scored[row * self.row_len + column] != 0)
    }

    fn forces(&self, row: usize, column: usize, given: Given) -> bool {
        let [_, sink, from, to] = std::array::from_fn(|i| self.bounds[4 * row + i] as usize);
        let in_bounds = given.bounds && (column < sink || (from..to).contains(&column));
        self.seen(row, column, given) && (in_bounds || (given.forced && self.forced[row * self.row_len + column] != 0))
    }

    fn enables(&self, row: usize, given: Given) -> bool {
        !given.enabled || self.enabled[row] != 0
    }

    /// Weights of the entries of a row, 0 if hidden.
    fn weights(&self, row: usize, given: Given) -> Vec<f64> {
        let of_row = row * self.row_len..(row + 1) * self.row_len;
        let scored = |column: usize| self.scores_entry(row, column, given);
        if !given.softmax {
            let scores = self.scores[of_row].iter().enumerate();
            return scores.map(|(column, &x)| if scored(column) { f64::from(x) } else { 0.0 }).collect();
        }
        let logits: Vec<f64> = self.logits()[of_row].iter().map(|&x| f64::from(x) * f64::from(SCALE)).collect();
        let most = (0..self.row_len).filter(|&i| scored(i)).map(|i| logits[i]).fold(f64::MIN, f64::max);
        let weights = logits.iter().enumerate();
        let weights: Vec<f64> = weights.map(|(i, x)| if scored(i) { (x - most).exp() } else { 0.0 }).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|x| if sum > 0.0 { x / sum } else { 0.0 }).collect()
    }

    /// For each entry or pair of a row: whether it must be chosen, and whether it may be chosen.
    fn expected(&self, row: usize, given: Given, wanted: f64, counts: bool, everything: bool) -> Vec<(bool, bool)> {
        let weights = self.weights(row, given);
        let weigh = |i: usize| if counts { 1.0 } else { weights[i] };
        let scored = |i: &usize| self.scores_entry(row, *i, given);
        let first = |i: &usize| given.forced_count_first && self.forces(row, *i, given);
        let mut reached: f64 = (0..self.row_len).filter(scored).filter(first).map(weigh).sum();
        let rounding = if counts { 0.0 } else { ROUNDING * weights.iter().sum::<f64>() };
        let mut order: Vec<usize> = (0..self.row_len).filter(scored).filter(|i| !first(i)).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        let select_all = everything || (given.select_all && self.select_all[row] != 0);
        let anyway = |i| self.forces(row, i, given) || (self.seen(row, i, given) && (select_all || !scored(&i)));
        let mut chosen: Vec<(bool, bool)> = (0..self.row_len).map(|i| (anyway(i), anyway(i))).collect();
        let enabled = self.enables(row, given);
        // Equal entries, up to rounding, are chosen together.
        let equal = |a: &usize, b: &usize| weights[*b] >= weights[*a] * (1.0 - ROUNDING);
        for ties in order.chunk_by(equal).filter(|ties| enabled && (counts || weights[ties[0]] > 0.0)) {
            // If entries are equal only up to rounding, the last of them may be omitted.
            let before_last = match ties {
                [first, .., last] if weights[*first] != weights[*last] => {
                    ties[1..].iter().map(|&i| weigh(i)).sum::<f64>()
                }
                _ => 0.0,
            };
            for &i in ties {
                chosen[i].0 |= reached + before_last < wanted - rounding;
                chosen[i].1 |= reached < wanted + rounding && wanted > 0.0;
            }
            reached += ties.iter().map(|&i| weigh(i)).sum::<f64>();
        }
        let either = |pair: &[(bool, bool)]| pair.iter().fold((false, false), |a, b| (a.0 || b.0, a.1 || b.1));
        if given.merge_pairs { chosen.chunks(2).map(either).collect() } else { chosen }
    }

    fn check(&self, device: &Device, given: Given) {
        let (rows, row_len) = (self.rows, self.row_len);
        let on_gpu = |data: &[f32]| Tensor::from_slice(data, (rows, row_len), device).unwrap();
        let bytes = |data: &[u8], width| Tensor::from_slice(data, (rows, width), device).unwrap();
        let scores = if given.softmax { on_gpu(&self.logits()) } else { on_gpu(&self.scores) };
        let bounds = Tensor::from_slice(&self.bounds, (rows, 4), device).unwrap();
        let (scored, forced) = (bytes(&self.scored, row_len), bytes(&self.forced, row_len));
        let (select_all, enabled) = (bytes(&self.select_all, 1), bytes(&self.enabled, 1));
        let choice = RowChoice {
            softmax: given.softmax.then_some(SCALE),
            bounds: given.bounds.then_some(&bounds),
            scored: given.scored.then_some(&scored),
            forced: given.forced.then_some(&forced),
            forced_count_first: given.forced_count_first,
            select_all: given.select_all.then_some(&select_all),
            enabled: given.enabled.then_some(&enabled),
            merge_pairs: given.merge_pairs,
        };
        let shares: Vec<f64> = (0..rows).map(|row| [0.9, 0.3, 1.0, 0.98][row % 4]).collect();
        let counts: Vec<f32> = (0..rows).map(|row| (row * row_len / rows.max(2) + row % 2) as f32).collect();
        let by_row = Tensor::from_slice(&counts, (rows, 1), device).unwrap();
        for select in [Select::TopP(&shares), Select::TopK(&by_row)] {
            let mask = choice.choose(&scores, select).unwrap().to_vec2::<u8>().unwrap();
            let width = if given.merge_pairs { row_len.div_ceil(2) } else { row_len };
            assert!(mask.len() == rows && mask.iter().all(|row| row.len() == width), "{given:?}");
            // The second run reuses memory with other contents.
            drop(Tensor::full(7u8, (rows, width), device).unwrap());
            let again = choice.choose(&scores, select).unwrap().to_vec2::<u8>().unwrap();
            assert!(again == mask, "{given:?}: two runs choose differently");
            let by_count = matches!(select, Select::TopK(_));
            for (row, mask) in mask.iter().enumerate() {
                let sum: f64 = self.weights(row, given).iter().sum();
                let wanted = if by_count { f64::from(counts[row]) } else { shares[row] * sum };
                let expected = self.expected(
                    row,
                    given,
                    wanted,
                    by_count,
                    !by_count && shares[row] >= 1.0 && self.enables(row, given),
                );
                for (column, (&got, (must, may))) in mask.iter().zip(expected).enumerate() {
                    assert!(
                        got <= 1 && (got != 0 || !must) && (got == 0 || may),
                        "{given:?}, by count {by_count}: row {row} of {row_len}, column {column}: {got}, \
                         not {must} to {may}"
                    );
                }
            }
        }
    }

    fn check_softmax(&self, device: &Device, given: Given) {
        let given = Given { softmax: true, scored: false, ..given };
        let scores = Tensor::from_slice(&self.logits(), (self.rows, self.row_len), device).unwrap();
        let bounds = Tensor::from_slice(&self.bounds, (self.rows, 4), device).unwrap();
        let got = row_softmax(&scores, SCALE, given.bounds.then_some(&bounds)).unwrap();
        for (row, got) in f64s(&got).chunks_exact(self.row_len).enumerate() {
            for (got, expected) in got.iter().zip(self.weights(row, given)) {
                assert!((got - expected).abs() <= ROUNDING * expected + 1e-12, "{row}: {got} for {expected}");
            }
        }
    }
}

/// Operands are broadcast to rows by their leading dimensions.
fn broadcast(device: &Device) {
    let dims = (2, 3, 40, 130);
    let scores = Tensor::from_vec(noise(2 * 3 * 40 * 130, 3), dims, device).unwrap();
    let bits = |len: usize, seed| noise(len, seed).into_iter().map(|x| u8::from(x > 0.0)).collect::<Vec<_>>();
    let scored = Tensor::from_vec(bits(3 * 130, 1), (1, 3, 1, 130), device).unwrap();
    let forced = Tensor::from_vec(bits(40 * 130, 2), (40, 130), device).unwrap();
    let select_all = Tensor::from_vec(bits(6 * 40, 3), (2, 3, 40, 1), device).unwrap();
    let enabled = Tensor::from_vec(bits(6, 4), (2, 3, 1, 1), device).unwrap();
    let bounds = Tensor::from_iter((0..40u32).flat_map(|row| [3 * row + 5, 2, row, row + 1]), device).unwrap();
    let bounds = bounds.reshape((40, 4)).unwrap();
    let spread = |x: &Tensor, width: usize| {
        let x = x.broadcast_as((2, 3, 40, width)).unwrap().contiguous().unwrap();
        x.reshape((240, width)).unwrap()
    };
    let spread_out = [&scored, &forced].map(|x| spread(x, 130));
    let [select_all_rows, enabled_rows] = [&select_all, &enabled].map(|x| spread(x, 1));
    let bounds_rows = spread(&bounds, 4);
    let choice = RowChoice {
        softmax: Some(20.0),
        bounds: Some(&bounds),
        scored: Some(&scored),
        forced: Some(&forced),
        select_all: Some(&select_all),
        enabled: Some(&enabled),
        ..RowChoice::default()
    };
    let by_row = RowChoice {
        bounds: Some(&bounds_rows),
        scored: Some(&spread_out[0]),
        forced: Some(&spread_out[1]),
        select_all: Some(&select_all_rows),
        enabled: Some(&enabled_rows),
        ..choice
    };
    let shares = [0.5, 0.9];
    let together = choice.choose(&scores, Select::TopP(&shares)).unwrap();
    let apart = by_row.choose(&scores.reshape((240, 130)).unwrap(), Select::TopP(&shares)).unwrap();
    let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    assert_eq!(flat(&together), flat(&apart));
    // A view with an unaligned address is copied.
    let narrowed = scores.flatten_to(2).unwrap().narrow(0, 1, 239).unwrap();
    let by_row = RowChoice { softmax: Some(20.0), ..RowChoice::default() };
    let all = by_row.choose(&scores.flatten_to(2).unwrap(), Select::TopP(&[0.7])).unwrap();
    let tail = by_row.choose(&narrowed, Select::TopP(&[0.7])).unwrap();
    assert_eq!(flat(&all)[130..], flat(&tail)[..]);
    let refused = RowChoice { forced: Some(&scored.narrow(3, 0, 129).unwrap()), ..RowChoice::default() };
    assert!(refused.choose(&scores, Select::TopP(&[0.7])).is_err());
    assert!(by_row.choose(&scores, Select::TopP(&[0.7; 7])).is_err());
}

/// More long rows than one launch processes.
fn many_long_rows(device: &Device) {
    let (rows, row_len) = (4100, 8193);
    let scores = Tensor::from_vec(noise(rows * row_len, 5), (rows, row_len), device).unwrap().abs().unwrap();
    let counts = Tensor::from_iter((0..rows).map(|row| (row % 700) as f32), device).unwrap().unsqueeze(1).unwrap();
    let shares: Vec<f64> = (0..rows).map(|row| row as f64 / rows as f64).collect();
    let choice = RowChoice::default();
    let chosen = |rows: std::ops::Range<usize>| {
        let of_rows = |x: &Tensor| x.narrow(0, rows.start, rows.len()).unwrap();
        let (scores, counts) = (of_rows(&scores), of_rows(&counts));
        let wanted = [Select::TopK(&counts), Select::TopP(&shares[rows.clone()])];
        wanted.map(|select| choice.choose(&scores, select).unwrap())
    };
    let (all, first, rest) = (chosen(0..rows), chosen(0..2000), chosen(2000..rows));
    for ((all, first), rest) in all.iter().zip(&first).zip(&rest) {
        let apart = Tensor::cat(&[first, rest], 0).unwrap();
        assert_eq!(
            all.ne(&apart).unwrap().to_dtype(DType::U32).unwrap().sum_all().unwrap().to_scalar::<u32>().unwrap(),
            0
        );
    }
    let numbers = all[0].to_dtype(DType::F32).unwrap().sum(1).unwrap().to_vec1::<f32>().unwrap();
    // Equal entries are chosen together.
    let exact = numbers.iter().enumerate().filter(|(row, number)| **number == (row % 700) as f32).count();
    assert!(exact > rows * 9 / 10, "{exact} of {rows}");
}

pub fn cases(runner: &mut Runner) {
    runner.case("selection chooses from many long rows", |runner| many_long_rows(&runner.device));
    for (dtype, head_dim) in [(DType::BF16, 128), (DType::F16, 64)] {
        for memory in [Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed, Memory::DimFirst, Memory::Unaligned] {
            runner.case(&format!("selection pools {dtype:?} {head_dim} {memory:?}"), |runner| {
                let sizes = Sizes { batch: 2, heads: [2, 2], q_len: 700, k_len: 700, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, 1.0);
                for (offset, block) in
                    [(0, 128), (0, 64), (100, 128), (90, 64), (4_000_000_000, 128), (3, 1), (5, 9000)]
                {
                    pooled(&problem, offset, block, false);
                    pooled(&problem, offset, block, true);
                }
            });
        }
    }
    let plain = Given::default();
    let all = Given {
        softmax: true,
        bounds: true,
        scored: true,
        forced: true,
        forced_count_first: false,
        select_all: true,
        enabled: true,
        merge_pairs: true,
    };
    for (rows, row_len) in
        [(500, 1), (300, 257), (70, 1024), (40, 2048), (40, 2049), (10, 5000), (9, 8192), (8, 8193), (4, 300_001)]
    {
        runner.case(&format!("selection chooses from rows of {row_len}"), |runner| {
            let rows = Rows::new(rows, row_len);
            let each = [
                plain,
                Given { softmax: true, ..plain },
                Given { bounds: true, ..plain },
                Given { scored: true, ..plain },
                Given { forced: true, ..plain },
                Given { forced: true, forced_count_first: true, bounds: true, ..plain },
                Given { select_all: true, enabled: true, ..plain },
                Given { merge_pairs: true, ..plain },
                all,
                Given { forced_count_first: true, merge_pairs: false, ..all },
            ];
            each.into_iter().for_each(|given| rows.check(&runner.device, given));
            rows.check_softmax(&runner.device, plain);
            rows.check_softmax(&runner.device, Given { bounds: true, ..plain });
        });
    }
    runner.case("selection broadcasts its operands", |runner| broadcast(&runner.device));
}
