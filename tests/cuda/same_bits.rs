//! The output of a head of a prompt is the same, bit for bit, whichever other heads a call has and whichever chunks
//! the prompt has: what models need that several GPUs share by heads.

use candle_core::{DType, Tensor};
use candle_s2o::{S2oConfig, S2oOp};

use crate::Runner;
use crate::exact::bits;
use crate::problem::{Memory, Problem, Sizes};

/// Prompts that the default ranks without probes and with them.
const LENGTHS: [usize; 2] = [9000, 27000];
const HEADS: [usize; 2] = [16, 4];

pub fn cases(runner: &mut Runner) {
    for (len, head_dim) in LENGTHS.into_iter().flat_map(|len| [(len, 128), (len, 256)]) {
        runner.case(&format!("same bits by heads and chunks, {len} tokens D{head_dim}"), |runner| {
            let sizes = Sizes { batch: 1, heads: HEADS, q_len: len, k_len: len, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
            let [q, k, v] = &problem.on_gpu;
            let run = |q: &Tensor, k: &Tensor, v: &Tensor| {
                // Otherwise heads of 256 would take the dense path at these lengths.
                let config = S2oConfig::builder().dense_below(0).build().unwrap();
                let op = S2oOp::new(problem.scale, config).with_prompt_len(len);
                op.apply_with_stats(q, k, v).unwrap()
            };
            let (whole, stats) = run(q, k, v);
            assert!(stats.density() < 0.95, "the case should skip: density {}", stats.density());

            for count in [1, 2] {
                let group = HEADS[0] / HEADS[1];
                for first in (0..HEADS[1]).step_by(count) {
                    let part = |x: &Tensor, heads: usize| x.narrow(2, first * heads, count * heads).unwrap();
                    let (out, _) = run(&part(q, group), &part(k, 1), &part(v, 1));
                    assert!(bits(&out) == bits(&part(&whole, group)), "KV heads from {first}, {count} of them");
                }
            }

            // Chunks of whole segments.
            for chunk in [4096, 8192] {
                for start in (0..len).step_by(chunk) {
                    let count = chunk.min(len - start);
                    let keys = |x: &Tensor| x.narrow(1, 0, start + count).unwrap();
                    let rows = |x: &Tensor| x.narrow(1, start, count).unwrap();
                    let (out, _) = run(&rows(q), &keys(k), &keys(v));
                    assert!(bits(&out) == bits(&rows(&whole)), "chunks of {chunk}: the one from {start}");
                }
            }
        });
    }
}
