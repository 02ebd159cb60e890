//! Attention on lists of blocks.

use candle_core::{DType, Device, Tensor};
use candle_s2o::cuda::CudaError;
use candle_s2o::{
    AttnError, BlockError, BlockLists, BlockSelection, KeyColumns, Mask, S2oError, block_mask_attn, block_sparse_attn,
};

use crate::Runner;
use crate::exact::{Row, bits, check};
use crate::problem::{Memory, Problem, Sizes};

const BLOCK: usize = 128;

/// A list for each query block: some of the key blocks, sometimes none.
fn lists(problem: &Problem, seen: Mask) -> Vec<Vec<usize>> {
    let shape = &problem.shape;
    let offset = if seen.is_causal() { shape.q_offset() } else { 0 };
    let (first, end) = (offset / BLOCK, (offset + shape.q_len()).div_ceil(BLOCK));
    let key_blocks = shape.k_len().div_ceil(BLOCK);
    (0..shape.batch() * shape.num_heads())
        .flat_map(|head| {
            (first..end).map(move |tile| {
                let end = if seen.is_causal() { tile + 1 } else { key_blocks };
                // Every fifth list omits the diagonal block, every seventh list is empty.
                let all = 0..end;
                all.filter(|block| {
                    let i = head * 11 + tile * 3 + block * 7;
                    (head + tile) % 7 != 6 && (i % 3 == 0 || (*block + 1 == end && (head + tile) % 5 != 4))
                })
                .collect()
            })
        })
        .collect()
}

/// The list of a row's query block.
fn list_of<'a>(problem: &Problem, lists: &'a [Vec<usize>], seen: Mask, at: Row) -> &'a [usize] {
    let shape = &problem.shape;
    let offset = if seen.is_causal() { shape.q_offset() } else { 0 };
    let (first, end) = (offset / BLOCK, (offset + shape.q_len()).div_ceil(BLOCK));
    &lists[(at.batch * shape.num_heads() + at.head) * (end - first) + (offset + at.row) / BLOCK - first]
}

fn keys(problem: &Problem, lists: &[Vec<usize>], seen: Mask, at: Row) -> Vec<u32> {
    let shape = &problem.shape;
    let end = if seen.is_causal() { shape.q_offset() + at.row + 1 } else { shape.k_len() };
    let list = list_of(problem, lists, seen, at);
    list.iter().flat_map(|&block| block * BLOCK..((block + 1) * BLOCK).min(end)).map(|key| key as u32).collect()
}

/// A choice of some keys of each head except the second, and the keys that the call uses.
fn columns(problem: &Problem, at_most: usize) -> (KeyColumns, Vec<Vec<u32>>) {
    let shape = &problem.shape;
    let heads = shape.batch() * shape.num_heads();
    let chosen = |head: usize, key: usize| head != 1 && (key * 7 + head * 5).is_multiple_of(3 + head);
    let keys: Vec<u8> =
        (0..heads * shape.k_len()).map(|i| u8::from(chosen(i / shape.k_len(), i % shape.k_len())) * 5).collect();
    let keys = Tensor::from_vec(keys, (shape.batch(), shape.num_heads(), shape.k_len()), &Device::Cpu).unwrap();
    // The view begins after another mask, at an unaligned address.
    let keys = Tensor::cat(&[&keys.narrow(0, 0, 1).unwrap(), &keys], 0).unwrap();
    let keys = keys.to_device(problem.on_gpu[0].device()).unwrap().narrow(0, 1, shape.batch()).unwrap();
    let columns = KeyColumns { keys, at_most };
    let taken = |head| {
        let keys = (0..shape.k_len()).filter(|&key| chosen(head, key)).map(|key| key as u32);
        keys.take(at_most.min(shape.k_len()).next_multiple_of(BLOCK)).collect()
    };
    (columns, (0..heads).map(taken).collect())
}

/// The lists as a mask. The mask also has blocks beyond the diagonal, which the call must ignore.
fn mask(problem: &Problem, lists: &[Vec<usize>], seen: Mask) -> Tensor {
    let shape = &problem.shape;
    let key_blocks = shape.k_len().div_ceil(BLOCK);
    let heads = shape.batch() * shape.num_heads();
    let rows = lists.len() / heads;
    let offset = if seen.is_causal() { shape.q_offset() } else { shape.k_len() };
    let chosen = |(i, list): (usize, &Vec<usize>)| {
        let seen = offset / BLOCK + i % rows + 1;
        let list = list.clone();
        (0..key_blocks).map(move |block| u8::from(block >= seen || list.contains(&block)) * 3).collect::<Vec<_>>()
    };
    let mask: Vec<u8> = lists.iter().enumerate().flat_map(chosen).collect();
    Tensor::from_vec(mask, (shape.batch(), shape.num_heads(), rows, key_blocks), &Device::Cpu).unwrap()
}

pub fn cases(runner: &mut Runner) {
    for (q_len, k_len, heads, dtype, head_dim, memory) in [
        (1000, 1000, [4, 2], DType::BF16, 128, Memory::Contiguous),
        (700, 1900, [8, 1], DType::F16, 128, Memory::HeadsFirst),
        (513, 2048, [4, 4], DType::BF16, 64, Memory::Narrowed),
        (4000, 4000, [8, 2], DType::F16, 64, Memory::Contiguous),
    ] {
        for seen in [Mask::Causal, Mask::Full] {
            let name = format!("blocks {q_len} of {k_len} {heads:?} D{head_dim} {dtype:?} {seen:?}");
            runner.case(&name, |runner| {
                let sizes = Sizes { batch: 2, heads, q_len, k_len, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, 4.0);
                let [q, k, v] = &problem.on_gpu;
                let lists = lists(&problem, seen);
                let blocks = BlockLists::new(lists.iter().map(|list| list.iter().copied()));
                problem.poison();
                let selection = BlockSelection::from(blocks);
                let (out, _) = block_sparse_attn(q, k, v, problem.scale, seen, selection).unwrap();
                check(&problem, &out, |at| vec![keys(&problem, &lists, seen, at)]);

                let mask = mask(&problem, &lists, seen).to_device(&runner.device).unwrap();
                problem.poison();
                let by_mask = block_mask_attn(q, k, v, problem.scale, seen, &mask, None).unwrap();
                assert!(bits(&by_mask) == bits(&out), "the mask gives other bits than its lists");
                if !seen.is_causal() {
                    return;
                }
                for at_most in [1, 500, usize::MAX] {
                    let (columns, chosen) = columns(&problem, at_most);
                    problem.poison();
                    let out = block_mask_attn(q, k, v, problem.scale, seen, &mask, Some(&columns)).unwrap();
                    check(&problem, &out, |at| {
                        let mut keys = keys(&problem, &lists, seen, at);
                        let query_block = (problem.shape.q_offset() + at.row) / BLOCK;
                        let first = (query_block * BLOCK).max(problem.shape.q_offset()) as u32;
                        let head = at.batch * problem.shape.num_heads() + at.head;
                        let blocks = list_of(&problem, &lists, seen, at);
                        let single = chosen[head].iter().copied().filter(|&key| key < first);
                        keys.extend(single.filter(|&key| !blocks.contains(&(key as usize / BLOCK))));
                        vec![keys]
                    });
                    let again = block_mask_attn(q, k, v, problem.scale, seen, &mask, Some(&columns)).unwrap();
                    assert!(bits(&again) == bits(&out), "two runs give other bits");
                }
            });
        }
    }
    runner.case("blocks that do not fit are typed errors", |runner| {
        let sizes = Sizes { batch: 1, heads: [1, 1], q_len: 256, k_len: 256, head_dim: 64 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 1.0);
        let refused = |selection: BlockSelection| {
            let [q, k, v] = &problem.on_gpu;
            block_sparse_attn(q, k, v, problem.scale, Mask::Causal, selection).expect_err("the selection does not fit")
        };
        let lists = |lists: Vec<Vec<usize>>| BlockLists::new(lists);
        let unfit = |error: BlockError| AttnError::S2o(S2oError::Blocks(error)).to_string();
        let error = refused(lists(vec![vec![0]]).into());
        assert_eq!(error.to_string(), unfit(BlockError::ListCount { expected: 2, got: 1 }));
        let error = refused(lists(vec![vec![1], vec![0]]).into());
        assert_eq!(error.to_string(), unfit(BlockError::KeyBlock { list: 0, below: 1, got: 1 }));
        let fits = || lists(vec![vec![0], vec![1]]);
        let halves = fits().with_block_k(64).unwrap();
        assert!(matches!(refused(halves.into()), AttnError::Cuda(CudaError::Tile { name: "block_k", got: 64 })));
        let [q, k, v] = &problem.on_gpu;
        let mask = Tensor::ones((1, 1, 2, 3), DType::U8, &runner.device).unwrap();
        let error =
            block_mask_attn(q, k, v, problem.scale, Mask::Causal, &mask, None).expect_err("the mask does not fit");
        let expected = BlockError::Mask { expected: [1, 1, 2, 2], got: vec![1, 1, 2, 3] };
        assert_eq!(error.to_string(), unfit(expected));
        let on_cpu = mask.to_device(&Device::Cpu).unwrap();
        let error =
            block_mask_attn(q, k, v, problem.scale, Mask::Causal, &on_cpu, None).expect_err("the mask is elsewhere");
        assert!(matches!(error, AttnError::DeviceMismatch { name: "mask", .. }));
        let columns = BlockSelection { columns: Some(vec![vec![3]]), ..fits().into() };
        assert!(matches!(refused(columns), AttnError::Cuda(CudaError::CpuOnly { what: "selected columns" })));
    });
}
