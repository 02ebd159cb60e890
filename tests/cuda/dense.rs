//! Dense attention, whole and split over the keys.

use candle_core::DType;
use candle_s2o::cuda::dense_attn_split;
use candle_s2o::{Mask, dense_attn, dense_attn_with_softcap};

use crate::Runner;
use crate::exact::{Row, bits, check};
use crate::problem::{Memory, Problem, Sizes};

fn causal_keys(problem: &Problem, at: Row) -> Vec<Vec<u32>> {
    vec![(0..=(problem.shape.q_offset() + at.row) as u32).collect()]
}

fn all_keys(problem: &Problem) -> Vec<Vec<u32>> {
    vec![(0..problem.shape.k_len() as u32).collect()]
}

pub fn cases(runner: &mut Runner) {
    const MEMORIES: [Memory; 5] =
        [Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed, Memory::DimFirst, Memory::Unaligned];
    let lengths: [usize; 16] = [1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 640, 1000, 2049, 5000];
    for (i, &len) in lengths.iter().enumerate() {
        for (j, heads) in [[4, 4], [8, 2], [8, 1]].into_iter().enumerate() {
            let dtype = if (i + j) % 2 == 0 { DType::BF16 } else { DType::F16 };
            let narrow = if (i + j / 2) % 2 == 0 { 128 } else { 64 };
            let memory = MEMORIES[(i + j) % MEMORIES.len()];
            let batch = 1 + (i + j) % 3;
            // Whole prompts and last chunks.
            let q_len = if j == 1 { len.div_ceil(3) } else { len };
            for (mask, head_dim) in
                [Mask::Causal, Mask::Full].into_iter().flat_map(|mask| [(mask, narrow), (mask, 256)])
            {
                let name = format!("dense {q_len} of {len} {heads:?} D{head_dim} {dtype:?} {memory:?} {mask:?}");
                runner.case(&name, |runner| {
                    let sizes = Sizes { batch, heads, q_len, k_len: len, head_dim };
                    let problem = Problem::new(&runner.device, sizes, dtype, memory, 4.0);
                    let [q, k, v] = &problem.on_gpu;
                    let keys = |at| if mask.is_causal() { causal_keys(&problem, at) } else { all_keys(&problem) };
                    problem.poison();
                    check(&problem, &dense_attn(q, k, v, problem.scale, mask).unwrap(), keys);
                    for splits in [2, 5, 1000] {
                        problem.poison();
                        let out = dense_attn_split(q, k, v, problem.scale, mask, splits).unwrap();
                        check(&problem, &out, keys);
                    }
                });
            }
        }
    }
    for head_dim in [64, 128, 256] {
        for (q_len, k_len) in [(1, 3000), (300, 300), (700, 1500), (2049, 2049)] {
            for mask in [Mask::Causal, Mask::Full] {
                runner.case(&format!("dense with softcap {q_len} of {k_len} D{head_dim} {mask:?}"), |runner| {
                    let sizes = Sizes { batch: 2, heads: [8, 2], q_len, k_len, head_dim };
                    let dtype = if q_len == 300 { DType::F16 } else { DType::BF16 };
                    let mut problem = Problem::new(&runner.device, sizes, dtype, Memory::HeadsFirst, 8.0);
                    problem.softcap = Some(4.0);
                    let [q, k, v] = &problem.on_gpu;
                    problem.poison();
                    let out = dense_attn_with_softcap(q, k, v, problem.scale, 4.0, mask).unwrap();
                    check(&problem, &out, |at| {
                        if mask.is_causal() { causal_keys(&problem, at) } else { all_keys(&problem) }
                    });
                });
            }
        }
    }
    runner.case("dense 32K of peaked scores, twice the same", |runner| {
        let sizes = Sizes { batch: 1, heads: [8, 2], q_len: 32768, k_len: 32768, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 16.0);
        let [q, k, v] = &problem.on_gpu;
        let out = dense_attn(q, k, v, problem.scale, Mask::Causal).unwrap();
        check(&problem, &out, |at| causal_keys(&problem, at));
        problem.poison();
        assert!(bits(&out) == bits(&dense_attn(q, k, v, problem.scale, Mask::Causal).unwrap()), "two runs differ");
    });
    for head_dim in [128, 256] {
        runner.case(&format!("dense decode step over 128K D{head_dim}"), |runner| {
            let sizes = Sizes { batch: 2, heads: [8, 2], q_len: 1, k_len: 131_072, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::HeadsFirst, 4.0);
            let [q, k, v] = &problem.on_gpu;
            check(&problem, &dense_attn(q, k, v, problem.scale, Mask::Causal).unwrap(), |at| causal_keys(&problem, at));
        });
    }
}
