//! Lengths and page numbers that do not fit. The host does not read those on the GPU, so the kernels must read and
//! write only rows that exist. compute-sanitizer over these cases sees what a wrong row does.

use candle_core::Tensor;
use candle_core::backend::BackendDevice;
use candle_core::{DType, Device};

use crate::call::{Call, Function, Lengths, Pages, ours};
use crate::{Runner, floats, near, on_cpu, tensor};

const CASES: u64 = 200;
const HEADS: [usize; 2] = [4, 2];

/// Numbers that are the same in every run (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }

    /// Mostly a number up to `most`, sometimes one far from it.
    fn number(&mut self, most: usize) -> i64 {
        match self.below(12) {
            0 => -(self.below(1 << 20) as i64),
            1 => i64::from(i32::MAX) - self.below(3) as i64,
            2 => (most + 1 + self.below(1 << 16)) as i64,
            _ => self.below(most + 1) as i64,
        }
    }
}

fn integers(values: Vec<i64>, dims: &[usize], device: &Device) -> Tensor {
    let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
    Tensor::from_vec(values, dims, device).expect("copied")
}

/// A random call, most of whose lengths or pages are wrong.
fn call(random: &mut Random, device: &Device) -> Call {
    let head_dim = [64, 128, 192, 256][random.below(4)];
    let (total_q, max) = (1 + random.below(300), 1 + random.below(300));
    let batch = 1 + random.below(4);
    let paged = random.below(2) == 0;
    let page_len = [1, 16, 48, 64][random.below(4)];
    let rows_k = if paged { (1 + random.below(6)) * page_len } else { 1 + random.below(300) };
    let mut ends = |total: usize| {
        let ends = (0..=batch).map(|_| random.number(total)).collect();
        integers(ends, &[batch + 1], device)
    };
    let lengths = Lengths { q: ends(total_q), k: ends(rows_k), max_q: max, max_k: max + 7 };
    let q = tensor(1, &[total_q, HEADS[0], head_dim], DType::BF16, device);
    let kv = |seed| {
        let kv = tensor(seed, &[rows_k, HEADS[1], head_dim], DType::BF16, device);
        if paged { kv.reshape(((), page_len, HEADS[1], head_dim)).expect("whole pages") } else { kv }
    };
    let qkv = [q, kv(2), kv(3)];
    let pages = paged.then(|| {
        let columns = 1 + random.below(8);
        let table = (0..batch * columns).map(|_| random.number(rows_k / page_len)).collect();
        let ranges = (0..batch * 2).map(|_| random.number(max)).collect();
        Pages {
            table: integers(table, &[batch, columns], device),
            prefix_ranges: (random.below(2) == 0).then(|| integers(ranges, &[batch, 1, 2], device)),
            page_len,
        }
    });
    let function = if paged { Function::VarlenPagedWindowed } else { Function::VarlenWindowed };
    let left = (random.below(3) == 0).then(|| random.below(100));
    Call { left, lengths: Some(lengths), pages, ..Call::new(function, qkv, 0.1, random.below(2) == 0) }
}

pub fn cases(runner: &mut Runner) {
    for seed in 1..=CASES {
        runner.case(&format!("wrong lengths {seed}"), |runner| {
            let device = runner.device.clone();
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let wrong = call(&mut random, &device);
            let out = ours(&wrong);
            device.as_cuda_device().and_then(|device| device.synchronize()).expect("no fault on the GPU");
            match (out, ours(&on_cpu(&wrong))) {
                // What the CPU path accepts is right, and the GPU computes it.
                (Ok(out), Ok(exact)) => near("lengths that fit", &out, &exact),
                (Ok(out), Err(_)) => assert!(floats(&out).iter().all(|x| x.is_finite()), "values that are no numbers"),
                (Err(error), Ok(_)) => panic!("the GPU refused what the CPU takes: {error}"),
                (Err(error), Err(_)) => assert!(error.to_string().contains("expected"), "{error}"),
            }
        });
    }
    runner.case("wrong lengths on the host are errors", |runner| {
        let device = runner.device.clone();
        let q = tensor(1, &[64, 2, 64], DType::BF16, &device);
        let host = |ends: &[u32]| Tensor::new(ends, &Device::Cpu).expect("copied");
        let refused = |ends: &[u32], words: &str| {
            let lengths = Lengths { q: host(ends), k: host(ends), max_q: 40, max_k: 40 };
            let qkv = [q.clone(), q.clone(), q.clone()];
            let call = Call { lengths: Some(lengths), ..Call::new(Function::Varlen, qkv, 0.1, true) };
            let error = ours(&call).expect_err("refused").to_string();
            assert!(error.contains(words), "expected an error with {words:?}, got {error}");
        };
        refused(&[0, 30, 20], "seqlens_q");
        refused(&[0, 30, 65], "seqlens_q");
        refused(&[0, 41, 64], "a length in seqlens_q");
    });
}
