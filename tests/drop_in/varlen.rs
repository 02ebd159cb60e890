//! Sequences of several lengths, and keys in pages.

use candle_core::{DType, Device, Tensor};

use crate::call::{Call, Function, Lengths, Pages};
use crate::{Runner, slopes, tensor};

const PAGE_LEN: usize = 32;

/// Lengths of the queries and keys of each sequence, and heads.
struct Sequences {
    q: &'static [usize],
    k: &'static [usize],
    heads: [usize; 2],
}

const CASES: [Sequences; 4] = [
    Sequences { q: &[2], k: &[2], heads: [3, 3] },
    Sequences { q: &[5, 17, 64, 1], k: &[9, 17, 200, 33], heads: [8, 2] },
    Sequences { q: &[296], k: &[296], heads: [8, 2] },
    // Several tiles, and sequences without queries or keys.
    Sequences { q: &[700, 0, 130, 64, 9], k: &[700, 5, 260, 640, 0], heads: [4, 2] },
];

fn ends(lengths: &[usize], device: &Device) -> Tensor {
    let mut ends = vec![0u32];
    lengths.iter().for_each(|&len| ends.push(ends[ends.len() - 1] + len as u32));
    Tensor::new(ends, device).expect("copied")
}

fn lengths(of: &Sequences, device: &Device) -> Lengths {
    let longest = |lengths: &[usize]| lengths.iter().copied().max().unwrap_or_default();
    Lengths { q: ends(of.q, device), k: ends(of.k, device), max_q: longest(of.q), max_k: longest(of.k) }
}

pub fn cases(runner: &mut Runner) {
    let device = runner.device.clone();
    for (dtype, head_dim) in [
        (DType::F16, 8),
        (DType::F16, 128),
        (DType::BF16, 64),
        (DType::BF16, 128),
        (DType::BF16, 200),
        (DType::F16, 256),
    ] {
        for sequences in &CASES {
            let [num_heads, num_kv_heads] = sequences.heads;
            let random = |seed, lengths: &[usize], heads| {
                let all = [heads, lengths.iter().sum(), head_dim];
                tensor(seed, &all, dtype, &device).transpose(0, 1).expect("three dimensions")
            };
            let kv = |seed| random(seed, sequences.k, num_kv_heads);
            let qkv = [random(1, sequences.q, num_heads), kv(2), kv(3)];
            let scale = (head_dim as f32).sqrt().recip();
            let call = |function, causal| Call {
                lengths: Some(lengths(sequences, &device)),
                ..Call::new(function, qkv.clone(), scale, causal)
            };
            let slopes = slopes(num_heads, &device);
            for causal in [false, true] {
                let name = format!("{:?} of {:?} causal {causal}", sequences.q, sequences.k);
                for function in [Function::Varlen, Function::VarlenWindowed, Function::VarlenAlibiWindowedSoftcap] {
                    runner.check(&name, &call(function, causal));
                }
                let alibi = |function| Call { slopes: Some(slopes.clone()), ..call(function, causal) };
                for function in
                    [Function::VarlenAlibi, Function::VarlenAlibiWindowed, Function::VarlenAlibiWindowedSoftcap]
                {
                    runner.check(&format!("{name}, slopes"), &alibi(function));
                }
                let capped = Call { softcap: 5.0, ..call(Function::VarlenAlibiWindowedSoftcap, causal) };
                runner.check(&format!("{name}, softcap"), &capped);
            }
            if sequences.q[0] > 4 {
                for (left, right) in [(3, 0), (100, 0), (70, 40)] {
                    let name = format!("{:?} of {:?}, window {left} {right}", sequences.q, sequences.k);
                    let sliding =
                        Call { left: Some(left), right: Some(right), ..call(Function::VarlenWindowed, false) };
                    runner.check(&name, &sliding);
                }
            }
        }
    }
    for (dtype, head_dim) in
        [(DType::F16, 128), (DType::BF16, 64), (DType::BF16, 128), (DType::BF16, 256), (DType::F16, 512)]
    {
        pages(runner, dtype, head_dim);
    }
    pages(runner, DType::BF16, 256);
}

/// One sequence of 296 tokens in pages that lie in another order.
fn pages(runner: &mut Runner, dtype: DType, head_dim: usize) {
    let device = runner.device.clone();
    let (len, needed) = (296usize, 296usize.div_ceil(PAGE_LEN));
    let held = needed + 7;
    let table: Vec<u32> = (0..needed).map(|page| ((page * 5 + 3) % held) as u32).collect();
    let store = |seed| tensor(seed, &[held, PAGE_LEN, 2, head_dim], dtype, &device);
    let q = tensor(1, &[len, 8, head_dim], dtype, &device);
    let ends = ends(&[len], &device);
    let pages = Pages {
        table: Tensor::new(table, &device).and_then(|t| t.unsqueeze(0)).expect("copied"),
        prefix_ranges: None,
        page_len: PAGE_LEN,
    };
    let scale = (head_dim as f32).sqrt().recip();
    let call = |causal| Call {
        lengths: Some(Lengths { q: ends.clone(), k: ends.clone(), max_q: len, max_k: len }),
        pages: Some(pages.clone()),
        ..Call::new(Function::VarlenPagedWindowed, [q.clone(), store(2), store(3)], scale, causal)
    };
    for causal in [false, true] {
        runner.check(&format!("causal {causal}"), &call(causal));
    }
    runner.check("a window that hides nothing", &Call { left: Some(1024), ..call(true) });
    let ranges = Tensor::new(&[6i32, 262], &device).and_then(|t| t.reshape((1, 1, 2))).expect("copied");
    let with_ranges = Pages { prefix_ranges: Some(ranges), ..pages.clone() };
    let ranged = Call { pages: Some(with_ranges), ..call(true) };
    runner.check("prefix ranges", &ranged);
    let capped = Call { softcap: 5.0, ..call(true) };
    runner.check("softcap", &capped);
    let sliding = Call { left: Some(3), ..call(true) };
    runner.check("window 3 0", &sliding);
}
