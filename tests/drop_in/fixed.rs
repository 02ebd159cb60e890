//! Tensors of one length, in the shapes of the original's tests and of models.

use candle_core::{D, DType, Device, Tensor};
use candle_s2o::{S2oConfig, S2oOp, SegmentLen};
use s2o_flash_attn::s2o::{Policy, collect_stats, set_policy, take_stats};
use s2o_flash_attn::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap,
    flash_attn_varlen_paged_windowed, flash_attn_windowed,
};

use crate::call::{Call, Function};
use crate::{Runner, floats, slopes, tensor};

/// Sizes of a call: batch, queries and keys, query and KV heads.
const SHAPES: [(usize, [usize; 2], [usize; 2]); 8] = [
    (1, [2, 2], [3, 3]),
    (1, [5, 5], [3, 3]),
    (2, [100, 100], [8, 2]),
    (1, [33, 257], [4, 1]),
    (1, [300, 1000], [6, 6]),
    (3, [1, 129], [8, 2]),
    // A new token over keys in several parts.
    (1, [1, 3000], [8, 2]),
    // Queries before the first key see nothing.
    (1, [70, 50], [4, 2]),
];

const HEAD_DIMS: [(DType, &[usize]); 2] =
    [(DType::F16, &[8, 64, 128, 160, 256]), (DType::BF16, &[8, 40, 64, 96, 104, 128, 136, 192, 224, 256])];

pub fn cases(runner: &mut Runner) {
    for (dtype, &head_dim) in HEAD_DIMS.iter().flat_map(|(dtype, dims)| dims.iter().map(move |dim| (*dtype, dim))) {
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
                for function in [Function::FlashAttn, Function::Op, Function::Windowed, Function::AlibiWindowedSoftcap]
                {
                    runner.check(&name, &call(function, causal));
                }
                let alibi = |function| Call { slopes: Some(slopes.clone()), ..call(function, causal) };
                for function in [Function::Alibi, Function::AlibiWindowed, Function::AlibiWindowedSoftcap, Function::Op]
                {
                    runner.check(&format!("{name}, slopes"), &alibi(function));
                }
                let capped = Call { softcap: 5.0, ..call(Function::AlibiWindowedSoftcap, causal) };
                runner.check(&format!("{name}, softcap"), &capped);
                let both = Call { softcap: 5.0, ..alibi(Function::AlibiWindowedSoftcap) };
                runner.check(&format!("{name}, softcap and slopes"), &both);
            }
            if q_len <= k_len {
                let wide = Call { left: Some(k_len), right: Some(k_len), ..call(Function::Windowed, false) };
                runner.check(&format!("{name}, a window that hides nothing"), &wide);
            }
            if q_len > 4 && k_len > 4 && q_len <= k_len {
                for (left, right) in [(2, 1), (3, 0), (100, 0), (64, 130)] {
                    let window = Call { left: Some(left), right: Some(right), ..call(Function::Windowed, false) };
                    let name = format!("{name}, window {left} {right}");
                    runner.check(&name, &window);
                }
            }
        }
    }
}

/// Errors of calls that the GPU does not support, which say what it supports.
pub fn errors(runner: &mut Runner) {
    let device = runner.device.clone();
    let zeros = |dims: [usize; 4], dtype, device: &Device| Tensor::zeros(&dims[..], dtype, device).expect("zeros");
    let half = |dims| zeros(dims, DType::BF16, &device);
    let refused = |q: &Tensor, kv: &Tensor, words: &str| {
        let error = flash_attn(q, kv, kv, 0.125, true).expect_err("refused").to_string();
        assert!(error.contains(words), "expected an error with {words:?}, got {error}");
    };
    runner.case("errors f32 on the GPU", |_| {
        let wide = zeros([1, 20, 2, 64], DType::F32, &device);
        refused(&wide, &wide, "expected dtype F16 or BF16 on CUDA, got F32");
    });
    runner.case("errors head_dim above 512", |_| {
        let wide = half([1, 20, 2, 520]);
        refused(&wide, &wide, "head_dim: expected a multiple of 8 up to 512 on CUDA, got 520");
    });
    runner.case("errors keys on the CPU", |_| {
        let there = zeros([1, 20, 2, 64], DType::BF16, &Device::Cpu);
        refused(&half([1, 20, 2, 64]), &there, "k: expected the device of q");
    });
    runner.case("errors slopes on another device", |_| {
        let x = half([1, 20, 2, 64]);
        for elsewhere in [Device::Cpu, Device::new_cuda_with_stream(0).expect("another device")] {
            let slopes = Tensor::zeros(2, DType::F32, &elsewhere).expect("zeros");
            let error = flash_attn_alibi(&x, &x, &x, &slopes, 0.125, true).expect_err("refused").to_string();
            assert!(error.contains("alibi_slopes: expected the device of q"), "{error}");
        }
    });
}

/// Long causal calls under the policy: compares them with the op, and counts them. A sequence in one tensor, or in
/// pages that lie in another order, has the bits of the call with one length.
pub fn policy(runner: &mut Runner) {
    for (head_dim, softcap) in [(128, None), (160, None), (256, None), (64, Some(4.0)), (256, Some(4.0))] {
        let name = format!("policy a long prompt by S2O D{head_dim} softcap {softcap:?}");
        runner.case(&name, |runner| long_prompt(runner, head_dim, softcap));
    }
}

fn long_prompt(runner: &Runner, head_dim: usize, softcap: Option<f32>) {
    const LEN: usize = 4096;
    const PAGE_LEN: usize = 64;
    let device = runner.device.clone();
    let random = |seed, heads| tensor(seed, &[1, LEN, heads, head_dim], DType::BF16, &device);
    // Peaked attention, so that there is something to skip.
    let q = (random(1, 8) * 4.0).expect("scaled");
    let (k, v) = (random(2, 2), random(3, 2));
    let config = S2oConfig::builder().tau(0.1).segment_len(SegmentLen::Fixed(512)).dense_below(2048).build();
    let config = config.expect("options");
    // The op has no kernels for other sizes: the columns beyond theirs are zeros.
    let kernel_dim = if head_dim == 64 { 64 } else { head_dim.next_multiple_of(128) };
    let pad = |x: &Tensor| x.pad_with_zeros(D::Minus1, 0, kernel_dim - head_dim).expect("padded");
    let op = S2oOp::new(0.088, config.clone());
    let op = softcap.map_or(op.clone(), |softcap| op.with_softcap(softcap));
    let op = op.apply(&pad(&q), &pad(&k), &pad(&v)).expect("S2O");
    let op = floats(&op.narrow(D::Minus1, 0, head_dim).expect("the columns of the heads"));
    let num_pages = LEN / PAGE_LEN;
    let table: Vec<u32> = (0..num_pages).map(|page| ((page * 37 + 5) % num_pages) as u32).collect();
    let mut places = vec![0u32; num_pages];
    table.iter().enumerate().for_each(|(page, &place)| places[place as usize] = page as u32);
    let places = Tensor::new(places, &device).expect("copied");
    let store = |x: &Tensor| x.reshape((num_pages, PAGE_LEN, 2, head_dim))?.index_select(&places, 0);
    let (paged_k, paged_v) = (store(&k).expect("pages"), store(&v).expect("pages"));
    let table = Tensor::new(table, &device).and_then(|table| table.unsqueeze(0)).expect("copied");
    let flat = [&q, &k, &v].map(|x| x.squeeze(0).expect("one sequence"));
    let ends = Tensor::new(&[0u32, LEN as u32], &device).expect("copied");
    let cap = softcap.unwrap_or(0.0);
    let varlen = |[q, k, v]: &[Tensor; 3], ends: &Tensor| {
        flash_attn_varlen_alibi_windowed_softcap(q, k, v, None, ends, ends, LEN, LEN, 0.088, None, Some(0), cap)
            .expect("sequences")
    };
    // The same sequence twice.
    let twice = flat.each_ref().map(|x| Tensor::cat(&[x, x], 0).expect("joined"));
    let ends_of_two = Tensor::new(&[0u32, LEN as u32, 2 * LEN as u32], &device).expect("copied");

    set_policy(Policy::S2o(config));
    collect_stats(true);
    let fixed = || flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.088, None, Some(0), cap);
    let plain = || match softcap {
        None => flash_attn(&q, &k, &v, 0.088, true),
        Some(_) => fixed(),
    };
    let by_policy = floats(&plain().expect("by the policy"));
    let same = floats(&fixed().expect("by the policy"));
    let sequence = floats(&varlen(&flat, &ends));
    let paged = flash_attn_varlen_paged_windowed(
        &flat[0],
        &paged_k,
        &paged_v,
        &ends,
        &ends,
        &table,
        None,
        LEN,
        LEN,
        0.088,
        None,
        Some(0),
        PAGE_LEN,
        softcap,
    );
    let two = floats(&varlen(&twice, &ends_of_two));
    let whole = flash_attn(&q, &k, &v, 0.088, false);
    let sliding = flash_attn_windowed(&q, &k, &v, 0.088, Some(1000), Some(0));
    let calls = take_stats().unwrap();
    collect_stats(false);
    set_policy(Policy::Dense);
    assert!(by_policy == op && same == op, "the drop-in computes something else than the op");
    assert!(sequence == op, "a sequence differs");
    assert!(floats(&paged.expect("pages")) == op, "pages differ");
    assert!(two[..op.len()] == op && two[op.len()..] == op, "two sequences differ");
    whole.expect("not causal");
    sliding.expect("a window");
    assert_eq!(calls.len(), 6, "{calls:?}");
    assert!(calls.iter().all(|call| call.stats.density() < 1.0), "nothing was skipped");
}
