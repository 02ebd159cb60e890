//! Tensors of one length, in the shapes of the original's tests and of models.

use candle_core::{DType, Tensor};

use crate::call::{Call, Function};
use crate::numbers::{slopes, tensor};
use crate::{Expect, Runner};

/// Sizes of a call: batch, queries and keys, query and KV heads.
const SHAPES: [(usize, [usize; 2], [usize; 2]); 7] = [
    (1, [2, 2], [3, 3]),
    (1, [5, 5], [3, 3]),
    (2, [100, 100], [8, 2]),
    (1, [33, 257], [4, 1]),
    (1, [300, 1000], [6, 6]),
    (3, [1, 129], [8, 2]),
    // Queries before the first key see nothing.
    (1, [70, 50], [4, 2]),
];

const KINDS: [(DType, usize); 9] = [
    (DType::F16, 8),
    (DType::F16, 64),
    (DType::F16, 128),
    (DType::BF16, 8),
    (DType::BF16, 40),
    (DType::BF16, 64),
    (DType::BF16, 96),
    (DType::BF16, 104),
    (DType::BF16, 128),
];

pub fn cases(runner: &mut Runner) {
    for (dtype, head_dim) in KINDS {
        for (batch, [q_len, k_len], [num_heads, num_kv_heads]) in SHAPES {
            let name = format!("{batch} x {q_len} of {k_len}, {num_heads}/{num_kv_heads} heads");
            let random = |seed, len, heads| -> Tensor {
                // Heads before length in memory, as a model has them.
                tensor(seed, &[batch, heads, len, head_dim], dtype, &runner.device)
                    .transpose(1, 2)
                    .expect("four dimensions")
            };
            let qkv = [random(1, q_len, num_heads), random(2, k_len, num_kv_heads), random(3, k_len, num_kv_heads)];
            let scale = (head_dim as f32).sqrt().recip();
            let slopes = slopes(num_heads, &runner.device);
            let call = |function, causal| Call::new(function, qkv.clone(), scale, causal);
            for causal in [false, true] {
                let name = format!("{name}, causal {causal}");
                runner.check(&name, &call(Function::FlashAttn, causal), Expect::Numbers);
                runner.check(&name, &call(Function::Op, causal), Expect::Numbers);
                runner.check(&name, &call(Function::Windowed, causal), Expect::Numbers);
                runner.check(&name, &call(Function::AlibiWindowedSoftcap, causal), Expect::Numbers);
                let alibi = |function| Call { slopes: Some(slopes.clone()), ..call(function, causal) };
                for function in [Function::Alibi, Function::AlibiWindowed, Function::AlibiWindowedSoftcap, Function::Op]
                {
                    runner.check(&format!("{name}, slopes"), &alibi(function), Expect::Refusal("ALiBi: expected"));
                }
                let capped = Call { softcap: 5.0, ..call(Function::AlibiWindowedSoftcap, causal) };
                runner.check(&format!("{name}, softcap"), &capped, Expect::Refusal("softcap: expected"));
                let both = Call { softcap: 5.0, ..alibi(Function::AlibiWindowedSoftcap) };
                runner.check(&format!("{name}, softcap and slopes"), &both, Expect::Refusal("ALiBi: expected"));
            }
            if q_len <= k_len {
                let wide = Call { left: Some(k_len), right: Some(k_len), ..call(Function::Windowed, false) };
                runner.check(&format!("{name}, a window that hides nothing"), &wide, Expect::Numbers);
            }
            if q_len > 4 && k_len > 4 && q_len <= k_len {
                let narrow = Call { left: Some(2), right: Some(1), ..call(Function::Windowed, false) };
                runner.check(&format!("{name}, window 2 1"), &narrow, Expect::Refusal("windowed attention: expected"));
                let sliding = Call { left: Some(3), right: Some(0), ..call(Function::Windowed, false) };
                runner.check(&format!("{name}, window 3 0"), &sliding, Expect::Refusal("windowed attention: expected"));
            }
        }
    }
}
