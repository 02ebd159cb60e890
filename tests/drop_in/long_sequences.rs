//! Long sequences next to short ones in one call, by the policy: the long ones are sparse, the others exact.

use candle_core::{DType, Device, Tensor};
use s2o_flash_attn::s2o::{Policy, S2oConfig, SegmentLen, collect_stats, set_policy, take_stats};

use crate::call::{Call, Function, Lengths, Pages, ours};
use crate::{Runner, floats, near, on_cpu, tensor};

const PAGE_LEN: usize = 64;
/// Sequences from this length on are sparse.
const SPARSE_FROM: usize = 2048;
const HEADS: [usize; 2] = [8, 2];

pub fn cases(runner: &mut Runner) {
    for head_dim in [64, 96, 128] {
        for paged in [false, true] {
            let case = |lengths: [usize; 5]| format!("long of {lengths:?} D{head_dim} paged {paged}");
            for lengths in [[2500, 700, 0, 4096, 1], [3000, 3000, 3000, 3000, 3000]] {
                runner.case(&case(lengths), |runner| by_policy(runner, head_dim, paged, lengths));
            }
        }
    }
}

struct Batch {
    lengths: [usize; 5],
    /// All queries, keys and values, without pages.
    flat: [Tensor; 3],
    call: Call,
}

fn ends(lengths: &[usize]) -> Vec<u32> {
    let mut ends = vec![0u32];
    lengths.iter().for_each(|&len| ends.push(ends[ends.len() - 1] + len as u32));
    ends
}

/// Nearly even attention, so that there is something to skip. Each sequence has its pages, in descending order.
fn batch(runner: &Runner, head_dim: usize, paged: bool, lengths: [usize; 5]) -> Batch {
    let device = &runner.device;
    let total = lengths.iter().sum();
    let random = |seed, heads| tensor(seed, &[total, heads, head_dim], DType::BF16, device);
    let flat = [random(1, HEADS[0]), random(2, HEADS[1]), random(3, HEADS[1])];
    let longest = lengths.into_iter().max().unwrap_or_default();
    let columns = longest.div_ceil(PAGE_LEN);
    let (mut table, mut pages) = (Vec::new(), [Vec::new(), Vec::new()]);
    let all: usize = lengths.iter().map(|len| len.div_ceil(PAGE_LEN)).sum();
    for (i, &len) in lengths.iter().enumerate() {
        let own = len.div_ceil(PAGE_LEN);
        let before: usize = lengths[..i].iter().map(|len| len.div_ceil(PAGE_LEN)).sum();
        table.extend((0..columns).map(|page| if page < own { (all - 1 - before - page) as u32 } else { 0 }));
        let start: usize = lengths[..i].iter().sum();
        for (pages, x) in pages.iter_mut().zip(&flat[1..]) {
            for page in 0..own {
                let rows = PAGE_LEN.min(len - page * PAGE_LEN);
                let content = x.narrow(0, start + page * PAGE_LEN, rows).expect("rows");
                pages.push(content.pad_with_zeros(0, 0, PAGE_LEN - rows).expect("a page"));
            }
        }
    }
    let of = |ends: Vec<u32>| Tensor::new(ends, device).expect("copied");
    let given = Lengths { q: of(ends(&lengths)), k: of(ends(&lengths)), max_q: longest, max_k: longest };
    let call = if paged {
        let [k, v] = pages.map(|mut pages| {
            pages.reverse();
            Tensor::stack(&pages, 0).expect("pages")
        });
        let table = Tensor::from_vec(table, (lengths.len(), columns), device).expect("copied");
        let pages = Pages { table, prefix_ranges: None, page_len: PAGE_LEN };
        let call = Call::new(Function::VarlenPagedWindowed, [flat[0].clone(), k, v], 0.088, true);
        Call { pages: Some(pages), lengths: Some(given), ..call }
    } else {
        Call { lengths: Some(given), ..Call::new(Function::Varlen, flat.clone(), 0.088, true) }
    };
    Batch { lengths, flat, call }
}

fn by_policy(runner: &Runner, head_dim: usize, paged: bool, lengths: [usize; 5]) {
    let config = S2oConfig::builder().tau(0.1).segment_len(SegmentLen::Fixed(512)).dense_below(SPARSE_FROM).build();
    let policy = Policy::S2o(config.expect("options"));
    let Batch { lengths, flat, call } = batch(runner, head_dim, paged, lengths);
    let exact = ours(&on_cpu(&call)).expect("the CPU path takes it");
    set_policy(policy.clone());
    collect_stats(true);
    let out = ours(&call);
    // The host has the lengths now, if it had to read them.
    let again = ours(&call);
    let calls = take_stats();
    let alone: Vec<Option<Tensor>> = (0..lengths.len())
        .map(|i| {
            let start = lengths[..i].iter().sum();
            let part = |x: &Tensor| x.narrow(0, start, lengths[i]).and_then(|x| x.unsqueeze(0)).expect("a sequence");
            let [q, k, v] = flat.each_ref().map(part);
            (lengths[i] >= SPARSE_FROM)
                .then(|| s2o_flash_attn::flash_attn(&q, &k, &v, 0.088, true).expect("S2O").squeeze(0).expect("one"))
        })
        .collect();
    // Other lengths in the same tensor: the host does not see them, and the kernel computes all of their rows.
    let given = call.lengths.as_ref().expect("sequences");
    let others: Vec<u32> = ends(&lengths).into_iter().enumerate().map(|(i, end)| end - u32::from(i > 0)).collect();
    let others = Tensor::new(others, &runner.device).expect("copied");
    given.q.slice_set(&others, 0, 0).expect("written");
    given.k.slice_set(&others, 0, 0).expect("written");
    let changed = ours(&call);
    // Without the last row the lengths that the host has read no longer fit.
    let total = lengths.iter().sum::<usize>();
    let cut = |x: &Tensor| if x.dims()[0] == total { x.narrow(0, 0, total - 1).expect("rows") } else { x.clone() };
    let shorter = Call { q: cut(&call.q), k: cut(&call.k), v: cut(&call.v), ..call.clone() };
    let there = |x: &Tensor| x.to_device(&Device::Cpu).expect("copied");
    let known = Lengths { q: there(&given.q), k: there(&given.k), ..given.clone() };
    let [unread, known] = [shorter.clone(), Call { lengths: Some(known), ..shorter }].map(|call| ours(&call));
    set_policy(Policy::Dense);
    collect_stats(false);
    let changed_exact = ours(&on_cpu(&call)).expect("the CPU path takes it");

    let out = out.expect("the GPU takes it");
    assert!(floats(&again.expect("the GPU takes it")) == floats(&out), "a second call differs");
    let calls = calls.expect("statistics");
    let sparse = alone.iter().flatten().count();
    assert_eq!(calls.len(), 2 * sparse, "a call for each long sequence");
    let densities: Vec<f64> = calls.iter().map(|call| call.stats.density()).collect();
    assert!(densities.iter().all(|&density| density < 1.0), "nothing was skipped: {densities:?}");
    for (i, alone) in alone.iter().enumerate().filter(|(i, _)| lengths[*i] > 0) {
        let rows = |x: &Tensor| x.narrow(0, lengths[..i].iter().sum(), lengths[i]).expect("a sequence");
        match alone {
            Some(alone) => assert!(floats(&rows(&out)) == floats(alone), "sequence {i} differs from a call of its own"),
            None => near("exact attention", &rows(&out), &rows(&exact)),
        }
    }
    // The last row belongs to no sequence now.
    near("changed lengths", &cut(&changed.expect("the GPU takes it")), &cut(&changed_exact));
    let [unread, known] = [unread, known].map(|out| floats(&out.expect("the GPU takes it")));
    assert!(unread == known, "changed lengths and rows: not the output of lengths that the host has");
}
