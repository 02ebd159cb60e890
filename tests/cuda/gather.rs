//! Attention to all keys in a given order.

use candle_core::DType;
use candle_s2o::cuda::{CudaError, gather_attn_timed};
use candle_s2o::{AttnError, Permutation};

use crate::Runner;
use crate::exact::check;
use crate::problem::{Memory, Problem, Sizes};

/// An order of `len` keys that depends on the head.
fn scattered(head: usize, len: usize) -> Permutation {
    Permutation::new((0..len).map(|i| ((i * 37 + head * 11) % len) as u32).collect()).unwrap()
}

pub fn cases(runner: &mut Runner) {
    for (batch, q_len, k_len, heads, dtype, head_dim, memory) in [
        (1, 640, 640, [4, 2], DType::BF16, 128, Memory::Contiguous),
        (2, 500, 1024, [4, 1], DType::F16, 128, Memory::HeadsFirst),
        (1, 77, 128, [2, 2], DType::BF16, 64, Memory::Narrowed),
        (3, 129, 2048, [8, 2], DType::F16, 64, Memory::Contiguous),
    ] {
        for tau in [0.0, 1e-30] {
            runner.case(&format!("gather {q_len} of {k_len} {heads:?} D{head_dim} {dtype:?} tau {tau}"), |runner| {
                let sizes = Sizes { batch, heads, q_len, k_len, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, 4.0);
                let [q, k, v] = &problem.on_gpu;
                let orders: Vec<Permutation> = (0..batch * heads[0]).map(|head| scattered(head, k_len)).collect();
                problem.poison();
                let (out, kernels) = gather_attn_timed(q, k, v, problem.scale, &orders, tau).unwrap();
                check(&problem, &out, |_| vec![(0..k_len as u32).collect()]);
                assert_eq!(kernels.len(), 1);
            });
        }
    }
    runner.case("gather with orders that do not fit is a typed error", |runner| {
        let refused = |k_len: usize, orders: Vec<Permutation>| {
            let sizes = Sizes { batch: 1, heads: [2, 1], q_len: 128, k_len, head_dim: 64 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 1.0);
            let [q, k, v] = &problem.on_gpu;
            match gather_attn_timed(q, k, v, problem.scale, &orders, 0.0) {
                Err(AttnError::Cuda(CudaError::Size { name, got, .. })) => (name, got),
                other => panic!("expected an error, got {other:?}"),
            }
        };
        let natural = Permutation::identity;
        assert_eq!(refused(200, vec![natural(200), natural(200)]), ("k_len", 200));
        assert_eq!(refused(256, vec![natural(256)]), ("orders", 1));
        assert_eq!(refused(256, vec![natural(256), natural(128)]), ("keys of an order", 128));
    });
}
