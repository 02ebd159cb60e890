//! Dense attention of one query per sequence.

use candle_core::{DType, Tensor};
use candle_s2o::cuda::dense_attn_timed;
use candle_s2o::{Mask, dense_attn};

use crate::Runner;
use crate::exact::{Row, bits, check, values};
use crate::problem::{Memory, Problem, Sizes};

const MEMORIES: [Memory; 5] =
    [Memory::InCache, Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed, Memory::Unaligned];
/// Groups of 1, 2, 4, 7, 8, 16 and 20 query heads; a block computes 16.
const HEADS: [[usize; 2]; 7] = [[8, 2], [4, 4], [2, 1], [14, 2], [8, 1], [16, 1], [40, 2]];
/// Around the keys of a warp (16), of a step (64), of a tile (128) and of the shortest part (256); parts of several
/// lengths.
const LENGTHS: [usize; 26] = [
    1, 2, 15, 16, 17, 48, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 511, 513, 1000, 2049, 4096, 5000, 16383,
    16500, 33001, 40001,
];

fn run(problem: &Problem, mask: Mask) -> Tensor {
    let [q, k, v] = &problem.on_gpu;
    problem.poison();
    dense_attn(q, k, v, problem.scale, mask).unwrap()
}

fn all_keys(problem: &Problem) -> impl Fn(Row) -> Vec<Vec<u32>> + Sync {
    let k_len = problem.shape.k_len() as u32;
    move |_| vec![(0..k_len).collect()]
}

pub fn cases(runner: &mut Runner) {
    for (i, &k_len) in LENGTHS.iter().enumerate() {
        for j in 0..3 {
            let heads = HEADS[(i + 3 * j) % HEADS.len()];
            let dtype = if (i + j) % 2 == 0 { DType::BF16 } else { DType::F16 };
            let head_dim = if (i + j / 2) % 2 == 0 { 128 } else { 64 };
            let memory = MEMORIES[(i + j) % MEMORIES.len()];
            let batch = 1 + (i + j) % 3;
            // With peaked scores the maximum rises late and often.
            let sharpness = [4.0, 16.0][(i / 2 + j) % 2];
            let name = format!("decode {batch} x {k_len} {heads:?} D{head_dim} {dtype:?} {memory:?} x{sharpness}");
            runner.case(&name, |runner| {
                let sizes = Sizes { batch, heads, q_len: 1, k_len, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, sharpness);
                let out = run(&problem, Mask::Causal);
                check(&problem, &out, all_keys(&problem));
                for mask in [Mask::Causal, Mask::Full] {
                    assert!(bits(&out) == bits(&run(&problem, mask)), "{mask:?}: other bits than the first run");
                }
            });
        }
    }
    for (k_len, head_dim, dtype) in [(200, 64, DType::F16), (1000, 128, DType::BF16), (20_000, 128, DType::F16)] {
        runner.case(&format!("decode NaN in one of {k_len} D{head_dim} {dtype:?}"), |runner| {
            not_a_number(runner, k_len, head_dim, dtype);
        });
        runner.case(&format!("decode same bits by heads and batch, {k_len} D{head_dim} {dtype:?}"), |runner| {
            same_bits(runner, k_len, head_dim, dtype);
        });
    }
    for (k_len, want) in [(256, &["decode"][..]), (257, &["decode", "merge"][..])] {
        runner.case(&format!("decode of {k_len} has its own kernel"), |runner| {
            let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 1, k_len, head_dim: 64 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
            let [q, k, v] = &problem.on_gpu;
            let (_, times) = dense_attn_timed(q, k, v, problem.scale, Mask::Causal).unwrap();
            assert_eq!(times.iter().map(|time| time.kernel).collect::<Vec<_>>(), want);
        });
    }
}

/// A NaN in a key reaches all outputs of its KV head's queries, a NaN in a value their outputs of its column, and
/// nothing else changes.
fn not_a_number(runner: &Runner, k_len: usize, head_dim: usize, dtype: DType) {
    const HEADS: [usize; 2] = [8, 2];
    const BATCH: usize = 2;
    let [num_heads, num_kv_heads] = HEADS;
    let new = || {
        let sizes = Sizes { batch: BATCH, heads: HEADS, q_len: 1, k_len, head_dim };
        Problem::new(&runner.device, sizes, dtype, Memory::Contiguous, 4.0)
    };
    let clean = bits(&run(&new(), Mask::Causal));
    let (in_batch, in_kv_head, in_column) = (1, 1, 5);
    for in_key in [0, 17, k_len / 2, k_len - 1] {
        let index = ((in_batch * k_len + in_key) * num_kv_heads + in_kv_head) * head_dim + in_column;
        for (which, name) in [(1, "key"), (2, "value")] {
            let mut problem = new();
            problem.replace(which, |i, x| if i == index { f32::NAN } else { x });
            let got = values(&run(&problem, Mask::Causal));
            for (i, (&got, &clean)) in got.iter().zip(&clean).enumerate() {
                let (column, row) = (i % head_dim, i / head_dim);
                let (head, batch) = (row % num_heads, row / num_heads);
                let seen = batch == in_batch && head / (num_heads / num_kv_heads) == in_kv_head;
                let at = format!("{name} {in_key}, output {column} of head {head} of sequence {batch}: {got}");
                match seen && (which == 1 || column == in_column) {
                    true => assert!(got.is_nan(), "{at}, expected NaN"),
                    false => assert_eq!(got.to_bits(), clean, "{at}, not as without NaN"),
                }
            }
        }
    }
}

/// The output of a head does not depend on the other heads and sequences of the call.
fn same_bits(runner: &Runner, k_len: usize, head_dim: usize, dtype: DType) {
    let sizes = Sizes { batch: 3, heads: [32, 8], q_len: 1, k_len, head_dim };
    let problem = Problem::new(&runner.device, sizes, dtype, Memory::InCache, 8.0);
    let whole = run(&problem, Mask::Causal);
    for batch in 0..3 {
        for (first, count) in [(0, 1), (3, 1), (7, 1), (2, 2), (4, 4)] {
            let part = |x: &Tensor, group: usize| {
                x.narrow(0, batch, 1).unwrap().narrow(2, first * group, count * group).unwrap()
            };
            let [q, k, v] = &problem.on_gpu;
            let out = dense_attn(&part(q, 4), &part(k, 1), &part(v, 1), problem.scale, Mask::Causal).unwrap();
            let want = bits(&part(&whole, 4));
            assert!(bits(&out) == want, "sequence {batch}, {count} KV heads from {first}");
        }
    }
}
