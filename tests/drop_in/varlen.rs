//! Sequences of several lengths, and keys in pages.

use candle_core::{DType, Device, Tensor};

use s2o_flash_attn::s2o::{Policy, S2oConfig, SegmentLen, set_policy};

use crate::call::{Call, Function, Lengths, Pages, ours};
use crate::{Runner, floats, near, on_cpu, slopes, tensor};

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
        (DType::BF16, 96),
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
    for page_len in [8, 16, 48, 128, 256] {
        for head_dim in [64, 96, 128] {
            several_in_pages(runner, head_dim, page_len);
        }
    }
    for head_dim in [64, 128, 192] {
        for causal in [false, true] {
            neighbour_without_numbers(runner, head_dim, causal);
            shorter_than_its_tensor(runner, head_dim, causal);
        }
    }
}

/// A sequence does not see that the next one has no numbers, although their rows share tiles.
fn neighbour_without_numbers(runner: &mut Runner, head_dim: usize, causal: bool) {
    runner.case(&format!("varlen beside NaN D{head_dim} causal {causal}"), |runner| {
        let device = runner.device.clone();
        let (first, second) = (200, 100);
        let random = |seed, len, heads| tensor(seed, &[len, heads, head_dim], DType::BF16, &device);
        let nan = Tensor::full(f32::NAN, (second, 2, head_dim), &device).and_then(|nan| nan.to_dtype(DType::BF16));
        let nan = nan.expect("filled");
        let kv = |seed, next: &Tensor| Tensor::cat(&[&random(seed, first, 2), next], 0).expect("joined");
        let clean = random(9, second, 2);
        let q = random(1, first + second, 4);
        let ends = ends(&[first, second], &device);
        let out = |next: &Tensor| {
            let lengths = Lengths { q: ends.clone(), k: ends.clone(), max_q: first, max_k: first };
            let call = Call::new(Function::Varlen, [q.clone(), kv(2, next), kv(3, next)], 0.1, causal);
            floats(&ours(&Call { lengths: Some(lengths), ..call }).expect("the GPU takes it"))
        };
        let (with_nan, exact) = (out(&nan), out(&clean));
        let rows = first * 4 * head_dim;
        assert!(with_nan[..rows] == exact[..rows], "the first sequence differs");
        assert!(with_nan[rows..].iter().all(|x| x.is_nan()), "the second sequence has numbers");
    });
}

/// `max_seqlen` is a bound: the only sequence may be shorter than its tensor, and only the GPU has its length.
fn shorter_than_its_tensor(runner: &mut Runner, head_dim: usize, causal: bool) {
    const LEN: usize = 4096;
    let config = S2oConfig::builder().tau(0.1).segment_len(SegmentLen::Fixed(512)).dense_below(2048).build();
    for policy in [Policy::Dense, Policy::S2o(config.expect("options"))] {
        for paged in [false, true] {
            let is_dense = matches!(policy, Policy::Dense);
            let name = format!("varlen shorter D{head_dim} causal {causal} paged {paged} dense {is_dense}");
            runner.case(&name, |runner| {
                let device = runner.device.clone();
                let (q_len, k_len) = (300, 3500);
                let random = |seed, len, heads| tensor(seed, &[len, heads, head_dim], DType::BF16, &device);
                let (q, k, v) = (random(1, 512, 4), random(2, LEN, 2), random(3, LEN, 2));
                let of = |ends: &[u32]| Tensor::new(ends, &device).expect("copied");
                let lengths = Lengths { q: of(&[0, q_len]), k: of(&[0, k_len]), max_q: 512, max_k: LEN };
                let function = if paged { Function::VarlenPagedWindowed } else { Function::Varlen };
                let pages = Pages {
                    table: Tensor::arange(0u32, (LEN / PAGE_LEN) as u32, &device)
                        .and_then(|t| t.unsqueeze(0))
                        .expect("one row"),
                    prefix_ranges: None,
                    page_len: PAGE_LEN,
                };
                let store = |x: &Tensor| match paged {
                    true => x.reshape((LEN / PAGE_LEN, PAGE_LEN, 2, head_dim)).expect("whole pages"),
                    false => x.clone(),
                };
                let qkv = [q.clone(), store(&k), store(&v)];
                let call = Call::new(function, qkv, 0.1, causal);
                let call = Call { lengths: Some(lengths), pages: paged.then_some(pages), ..call };
                set_policy(policy.clone());
                let out = ours(&call);
                set_policy(Policy::Dense);
                let exact = ours(&on_cpu(&call)).expect("the CPU path takes it");
                let rows = |x: &Tensor| x.narrow(0, 0, q_len as usize).expect("rows of the sequence");
                near("ours on the CPU", &rows(&out.expect("the GPU takes it")), &rows(&exact));
            });
        }
    }
}

/// Sequences of several tiles in pages in another order, two of which they share. The pages that no sequence has, and the
/// rows after the last token of each sequence, have no numbers.
fn several_in_pages(runner: &mut Runner, head_dim: usize, page_len: usize) {
    const LENGTHS: [usize; 4] = [700, 130, 0, 385];
    let device = runner.device.clone();
    let columns = LENGTHS[0].div_ceil(page_len);
    let needed = |i: usize| LENGTHS[i].div_ceil(page_len);
    let held = 2 * columns + needed(3) + 1;
    let page = |i: usize, n: usize| match i {
        _ if n >= needed(i) => held - 1,
        // The second sequence begins with the pages of the first.
        1 if n + 1 < needed(1) => 2 * n,
        _ => (2 * n + i % 2).min(held - 2),
    };
    let table: Vec<u32> = (0..4).flat_map(|i| (0..columns).map(move |n| page(i, n) as u32)).collect();
    let mut exists = vec![0f32; held * page_len];
    for i in [0, 1, 3] {
        for token in 0..LENGTHS[i] {
            exists[page(i, token / page_len) * page_len + token % page_len] = 1.0;
        }
    }
    let nan: Vec<f32> = exists.iter().map(|&x| if x > 0.0 { 0.0 } else { f32::NAN }).collect();
    let nan = Tensor::from_vec(nan, (held, page_len, 1, 1), &device).and_then(|nan| nan.to_dtype(DType::BF16));
    let nan = nan.expect("copied");
    let store = |seed| {
        tensor(seed, &[held, page_len, 2, head_dim], DType::BF16, &device).broadcast_add(&nan).expect("one shape")
    };
    let q = tensor(1, &[LENGTHS.iter().sum(), 8, head_dim], DType::BF16, &device);
    let ends = ends(&LENGTHS, &device);
    let pages =
        Pages { table: Tensor::from_vec(table, (4, columns), &device).expect("copied"), prefix_ranges: None, page_len };
    for (causal, softcap) in [(false, 0.0), (true, 0.0), (true, 5.0)] {
        let name = format!("{LENGTHS:?} in pages of {page_len} D{head_dim} causal {causal} softcap {softcap}");
        runner.case(&name, |_| {
            let call = Call {
                lengths: Some(Lengths { q: ends.clone(), k: ends.clone(), max_q: LENGTHS[0], max_k: LENGTHS[0] }),
                pages: Some(pages.clone()),
                softcap,
                ..Call::new(Function::VarlenPagedWindowed, [q.clone(), store(2), store(3)], 0.1, causal)
            };
            let exact = ours(&on_cpu(&call)).expect("the CPU path takes it");
            near("ours on the CPU", &ours(&call).expect("the GPU takes it"), &exact);
        });
    }
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
