//! The scoring kernels of the selectors against plain loops on the host: attention of the last queries, reordered keys,
//! strides. Antidiagonals are compared with the CPU path.

use candle_core::{DType, Device, Tensor};
use candle_s2o::cuda::CudaError;
use candle_s2o::{AttnError, BLOCK_Q};
use s2o_baselines::antidiagonal_scores;
use s2o_baselines::cuda::last_query_scores::{by_key, by_key_and_distance};
use s2o_baselines::cuda::{StrideOrder, reorder_keys, stride_shares, token_strides};

use crate::Runner;
use crate::exact::values;
use crate::problem::{Memory, Problem, Sizes, noise};

/// Fills memory of `elements` f32 with NaN and releases it, so that outputs reuse it and unwritten elements stay NaN.
fn poison(device: &Device, elements: usize) {
    Tensor::full(f32::NAN, elements, device).unwrap();
}

fn assert_close(what: &str, got: &[f32], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= relative * want.abs() + absolute, "{what}, entry {i}: got {got}, expected {want}");
    }
}

/// The weights of a softmax.
fn softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// The mean attention of the last `count` queries, by key and by distance.
fn last_queries(problem: &Problem, count: usize) -> [Vec<f64>; 2] {
    let shape = &problem.shape;
    let (heads, kv_heads, dim, k_len) = (shape.num_heads(), shape.num_kv_heads(), shape.head_dim(), shape.k_len());
    let [q, k, _] = &problem.host;
    let rows = count.min(shape.q_len());
    let mut sums = [vec![0.0; shape.batch() * heads * k_len], vec![0.0; shape.batch() * heads * k_len]];
    for head in 0..shape.batch() * heads {
        let (batch, kv_head) = (head / heads, shape.kv_head(head % heads));
        for row in shape.q_len() - rows..shape.q_len() {
            let query = &q[((batch * shape.q_len() + row) * heads + head % heads) * dim..][..dim];
            let position = shape.q_offset() + row;
            let product = |key: usize| {
                let key = &k[((batch * k_len + key) * kv_heads + kv_head) * dim..][..dim];
                query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>()
            };
            let logits: Vec<f64> = (0..=position).map(|key| product(key) * f64::from(problem.scale)).collect();
            for (key, weight) in softmax(&logits).into_iter().enumerate() {
                sums[0][head * k_len + key] += weight / rows as f64;
                sums[1][head * k_len + position - key] += weight / rows as f64;
            }
        }
    }
    sums
}

fn last_query_cases(runner: &mut Runner) {
    for (batch, heads, q_len, k_len, head_dim, dtype, memory, count) in [
        (1, [2, 1], 1000, 1000, 128, DType::BF16, Memory::Contiguous, 128),
        (2, [4, 2], 517, 2048, 64, DType::F16, Memory::HeadsFirst, 64),
        (2, [4, 1], 300, 1111, 128, DType::F16, Memory::Narrowed, 128),
        (1, [3, 3], 40, 777, 64, DType::BF16, Memory::DimFirst, 128),
        (1, [2, 2], 129, 129, 128, DType::BF16, Memory::Unaligned, 64),
        (1, [2, 1], 1, 1, 64, DType::BF16, Memory::Contiguous, 64),
        (1, [2, 1], 1, 64, 128, DType::F16, Memory::Contiguous, 128),
        (1, [1, 1], 65, 65, 64, DType::F16, Memory::Contiguous, 65),
        // The kernel splits the keys.
        (1, [2, 1], 200, 20_000, 128, DType::BF16, Memory::Contiguous, 128),
        (1, [8, 4], 9000, 9000, 64, DType::BF16, Memory::HeadsFirst, 17),
    ] {
        let name = format!("selection last {count} of {q_len} of {k_len} {heads:?} D{head_dim} {dtype:?} {memory:?}");
        runner.case(&name, |runner| {
            let sizes = Sizes { batch, heads, q_len, k_len, head_dim };
            let problem = Problem::new(&runner.device, sizes, dtype, memory, 8.0);
            let [q, k, _] = &problem.on_gpu;
            let [want_by_key, want_by_distance] = last_queries(&problem, count);
            let run = || {
                poison(&runner.device, want_by_key.len());
                poison(&runner.device, want_by_key.len());
                by_key_and_distance(q, k, problem.scale, count).unwrap()
            };
            let [keys, distances] = run();
            assert_eq!([keys.dims(), distances.dims()], [[batch, heads[0], k_len]; 2]);
            assert_close("by key", &values(&keys), &want_by_key, 1e-4, 1e-9);
            assert_close("by distance", &values(&distances), &want_by_distance, 1e-4, 1e-9);
            let again = run();
            assert!(values(&again[0]) == values(&keys) && values(&again[1]) == values(&distances), "other bits");
            poison(&runner.device, want_by_key.len());
            let alone = by_key(q, k, problem.scale, count).unwrap();
            assert!(values(&alone) == values(&keys), "without distances: other bits");
        });
    }
}

fn order_cases(runner: &mut Runner) {
    for (batch, heads, order_heads, k_len, head_dim, before, memory) in [
        (1, [4, 2], 4, 1000, 128, 768, Memory::Contiguous),
        (2, [4, 2], 2, 517, 64, 512, Memory::HeadsFirst),
        (2, [6, 2], 6, 300, 128, 256, Memory::Narrowed),
        (1, [2, 1], 2, 257, 64, 128, Memory::DimFirst),
        (1, [3, 3], 3, 130, 40, 128, Memory::Contiguous),
    ] {
        runner.case(&format!("selection {before} of {k_len} keys reordered D{head_dim} {memory:?}"), |runner| {
            let sizes = Sizes { batch, heads, q_len: 1, k_len, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, memory, 1.0);
            let [_, k, v] = &problem.on_gpu;
            let order: Vec<u32> =
                (0..batch * order_heads * before).map(|i| ((i * 37 + i / before * 11) % k_len) as u32).collect();
            let positions = Tensor::from_slice(&order, (batch, order_heads, before), &runner.device).unwrap();
            let len = before + k_len;
            let [k, v] = reorder_keys(k, v, &positions).unwrap();
            for (what, got, source) in [("keys", k, &problem.host[1]), ("values", v, &problem.host[2])] {
                assert_eq!(got.dims(), [batch, len, order_heads, head_dim], "{what}");
                assert!(got.is_contiguous());
                let got = values(&got);
                for (i, got) in got.chunks_exact(head_dim).enumerate() {
                    let (sequence, row, head) = (i / order_heads / len, i / order_heads % len, i % order_heads);
                    let from = match row.checked_sub(before) {
                        Some(natural) => natural,
                        None => order[(sequence * order_heads + head) * before + row] as usize,
                    };
                    let kv_head = head * heads[1] / order_heads;
                    let want = &source[((sequence * k_len + from) * heads[1] + kv_head) * head_dim..][..head_dim];
                    assert!(got == want, "{what}: sequence {sequence}, row {row}, head {head}");
                }
            }
        });
    }
    runner.case("selection keys of positions that do not exist", |runner| {
        let sizes = Sizes { batch: 1, heads: [1, 1], q_len: 1, k_len: 10, head_dim: 64 };
        let problem = Problem::new(&runner.device, sizes, DType::F16, Memory::Contiguous, 1.0);
        let [_, k, v] = &problem.on_gpu;
        let positions = Tensor::new(&[[[u32::MAX, 10, 3]]], &runner.device).unwrap();
        let [reordered, _] = reorder_keys(k, v, &positions).unwrap();
        let row = |x: &Tensor, row: usize| values(&x.narrow(1, row, 1).unwrap());
        for (at, from) in [(0, 9), (1, 9), (2, 3), (3, 0), (12, 9)] {
            assert!(row(&reordered, at) == row(k, from), "row {at}");
        }
    });
}

fn stride_cases(runner: &mut Runner) {
    for (len, heads, head_dim, stride, missing, memory) in [
        (1000, [4, 2], 128, 16, [0, 24], Memory::Contiguous),
        (104, [3, 3], 64, 16, [24, 0], Memory::HeadsFirst),
        (300, [2, 1], 128, 128, [100, 112], Memory::Narrowed),
        (77, [2, 2], 64, 8, [3, 0], Memory::DimFirst),
        (50, [1, 1], 24, 1, [0, 0], Memory::Contiguous),
    ] {
        runner.case(&format!("selection {len} tokens in strides of {stride} D{head_dim} {memory:?}"), |runner| {
            let sizes = Sizes { batch: 2, heads, q_len: len, k_len: len, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::F16, memory, 1.0);
            let slots = missing[0] + len + missing[1];
            for (order, sequence) in [(StrideOrder::Forward, 0), (StrideOrder::Backward, 1)] {
                let x = problem.on_gpu[0].get(sequence).unwrap();
                poison(&runner.device, heads[0] * slots * head_dim / 2);
                let got = token_strides(&x, stride, missing, order).unwrap();
                assert_eq!(got.dims(), [heads[0], slots / stride, stride * head_dim]);
                for (i, got) in values(&got).chunks_exact(head_dim).enumerate() {
                    let (head, slot) = (i / slots, i % slots);
                    let inside = match order {
                        StrideOrder::Forward => slot % stride,
                        StrideOrder::Backward => stride - 1 - slot % stride,
                    };
                    let token = (slot / stride * stride + inside).checked_sub(missing[0]).filter(|&token| token < len);
                    let from = token.map(|token| ((sequence * len + token) * heads[0] + head) * head_dim);
                    match from {
                        Some(from) => assert!(got == &problem.host[0][from..][..head_dim], "head {head}, slot {slot}"),
                        None => assert!(got.iter().all(|&x| x == 0.0), "head {head}, slot {slot}"),
                    }
                }
            }
        });
    }
    for (heads, blocks, columns, key_blocks, per_block, dtype) in [
        (3, 5, 40, 48, 8, DType::BF16),
        (1, 2, 300, 300, 8, DType::F16),
        (2, 3, 37, 37, 1, DType::F16),
        (2, 3, 64, 70, 4, DType::BF16),
        (1, 2, 9, 9, 16, DType::BF16),
        (1, 1, 5, 6, 128, DType::F16),
    ] {
        runner.case(&format!("selection shares of {columns} blocks of {per_block} strides {dtype:?}"), |runner| {
            let (rows, width) = (blocks * per_block, columns * per_block);
            let scale = 0.5;
            let wide = Tensor::from_vec(noise(heads * rows * width, 5), (heads, rows, width), &Device::Cpu).unwrap();
            let products = (wide * 40.0).unwrap().to_dtype(dtype).unwrap();
            let host = values(&products);
            let limit = |row: usize| if row % 7 == 3 { 0 } else { (row * 31 + 1) % width + 1 };
            let limits: Vec<u32> = (0..rows).map(|row| limit(row) as u32).collect();
            let limits = Tensor::new(limits, &runner.device).unwrap();
            let products = products.to_device(&runner.device).unwrap();
            poison(&runner.device, heads * blocks * key_blocks);
            let got = stride_shares(&products, &limits, per_block, key_blocks, scale).unwrap();
            assert_eq!(got.dims(), [heads, blocks, key_blocks]);
            let mut want = vec![0.0; heads * blocks * key_blocks];
            for (i, row) in host.chunks_exact(width).enumerate() {
                let logits: Vec<f64> =
                    row[..limit(i % rows)].iter().map(|&x| f64::from(x) * f64::from(scale)).collect();
                for (column, weight) in softmax(&logits).into_iter().enumerate() {
                    want[i / per_block * key_blocks + column / per_block] += weight;
                }
            }
            assert_close("shares", &values(&got), &want, 1e-4, 1e-9);
        });
    }
}

fn antidiagonal_cases(runner: &mut Runner) {
    for (batch, heads, q_len, k_len, head_dim, dtype, memory, stride) in [
        (2, [4, 2], 1000, 1000, 128, DType::BF16, Memory::Contiguous, 16),
        (1, [4, 1], 300, 1411, 64, DType::F16, Memory::HeadsFirst, 16),
        (1, [2, 2], 129, 2000, 128, DType::F16, Memory::Narrowed, 8),
        (1, [2, 1], 517, 517, 64, DType::BF16, Memory::DimFirst, 32),
        (1, [2, 1], 200, 333, 64, DType::F16, Memory::Contiguous, 128),
        (1, [2, 1], 200, 200, 40, DType::F16, Memory::Unaligned, 16),
        // The queries are processed in parts.
        (1, [2, 1], 9000, 9000, 64, DType::BF16, Memory::Contiguous, 16),
        // Candle's ops compute f32.
        (1, [2, 1], 300, 500, 64, DType::F32, Memory::HeadsFirst, 16),
    ] {
        let name = format!("selection antidiagonals {q_len} of {k_len} D{head_dim} {dtype:?} {memory:?} by {stride}");
        runner.case(&name, |runner| {
            let sizes = Sizes { batch, heads, q_len, k_len, head_dim };
            let problem = Problem::new(&runner.device, sizes, dtype, memory, 16.0);
            let ([cq, ck, _], [q, k, _]) = (&problem.on_cpu, &problem.on_gpu);
            let want = antidiagonal_scores(cq, ck, stride, problem.scale).unwrap();
            poison(&runner.device, want.elem_count());
            let got = antidiagonal_scores(q, k, stride, problem.scale).unwrap();
            assert_eq!(got.dims(), want.dims());
            let want: Vec<f64> = values(&want).into_iter().map(f64::from).collect();
            // The products are rounded to 16 bits.
            assert_close("scores", &values(&got), &want, 0.03, 1e-6);
            let again = antidiagonal_scores(q, k, stride, problem.scale).unwrap();
            assert!(values(&again) == values(&got), "other bits");
        });
    }
}

fn refusals(device: &Device) {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device).unwrap();
    let size_error = |error: AttnError| match error {
        AttnError::Cuda(CudaError::Size { name, got, .. }) => (name, got),
        other => panic!("expected sizes that do not fit, got {other}"),
    };
    let x = zeros(&[1, 200, 2, 64], DType::BF16);
    for count in [0, 129] {
        assert_eq!(size_error(by_key(&x, &x, 0.1, count).unwrap_err()), ("last queries", count));
    }
    let odd = zeros(&[1, 200, 2, 96], DType::BF16);
    let error = by_key(&odd, &odd, 0.1, 64).unwrap_err();
    assert!(matches!(error, AttnError::Cuda(CudaError::HeadDim { got: 96, .. })), "{error}");
    let wide = zeros(&[1, 200, 2, 64], DType::F32);
    let error = by_key(&wide, &wide, 0.1, 64).unwrap_err();
    assert!(matches!(error, AttnError::Cuda(CudaError::DType { name: "q", got: DType::F32 })), "{error}");
    let error = by_key(&x, &x.to_device(&Device::Cpu).unwrap(), 0.1, 64).unwrap_err();
    assert!(matches!(error, AttnError::DeviceMismatch { name: "k", .. }), "{error}");
    let on_cpu = x.to_device(&Device::Cpu).unwrap();
    let error = by_key(&on_cpu, &on_cpu, 0.1, 64).unwrap_err();
    assert!(matches!(error, AttnError::GpuOnly { .. }), "{error}");

    assert!(reorder_keys(&x, &x, &zeros(&[1, 3, 128], DType::U32)).is_err(), "3 heads of 2");
    assert!(reorder_keys(&x, &x, &zeros(&[1, 2, 128], DType::U8)).is_err(), "positions of u8");
    assert!(reorder_keys(&x, &odd, &zeros(&[1, 2, 128], DType::U32)).is_err(), "other values");
    let ragged = zeros(&[1, 200, 2, 20], DType::BF16);
    let error = reorder_keys(&ragged, &ragged, &zeros(&[1, 2, 128], DType::U32)).unwrap_err();
    assert_eq!(size_error(error.into()), ("head_dim", 20));

    let tokens = zeros(&[100, 2, 64], DType::F16);
    assert_eq!(
        size_error(token_strides(&tokens, 16, [0, 0], StrideOrder::Backward).unwrap_err().into()),
        ("tokens", 100)
    );
    assert_eq!(
        size_error(token_strides(&tokens, 0, [0, 0], StrideOrder::Backward).unwrap_err().into()),
        ("tokens", 100)
    );
    let (products, limits) = (zeros(&[1, 16, 24], DType::F16), zeros(&[16], DType::U32));
    let refused =
        |per_block, blocks| size_error(stride_shares(&products, &limits, per_block, blocks, 1.0).unwrap_err().into());
    assert_eq!(refused(3, 8), ("strides of a block", 3));
    assert_eq!(refused(2 * BLOCK_Q, 8), ("strides of a block", 256));
    assert_eq!(refused(16, 8), ("columns", 24));
    assert_eq!(refused(8, 2), ("key blocks", 2));
    assert!(stride_shares(&products, &zeros(&[8], DType::U32), 8, 3, 1.0).is_err(), "limits of other rows");
}

pub fn cases(runner: &mut Runner) {
    last_query_cases(runner);
    order_cases(runner);
    stride_cases(runner);
    antidiagonal_cases(runner);
    runner.case("selection misfits are refused", |runner| refusals(&runner.device));
}
