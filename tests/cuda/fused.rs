//! The decoder's kernels against their CPU implementations in f32, on the same 16-bit numbers.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use s2o_models::fused::{
    Heads, LayerCache, Linear, QkNorm, Rotary, Stacked, StackedLinear, add_rms_norm, join_heads, rms_norm,
    rotate_into_cache, silu_mul,
};
use s2o_models::{DeviceMemory, decode_attn};
use s2o_testkit::{noise, relative_l2};

use crate::Runner;
use crate::exact::{bits, values};

/// The same numbers on the GPU in 16 bits and on the CPU in f32.
fn pair(device: &Device, dims: &[usize], dtype: DType, seed: u64, scale: f32) -> (Tensor, Tensor) {
    let numbers: Vec<f32> = noise(dims.iter().product(), seed).into_iter().map(|x| x * scale).collect();
    let narrow = Tensor::from_vec(numbers, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    (narrow.to_device(device).unwrap(), narrow.to_dtype(DType::F32).unwrap())
}

/// Allows half a unit in the last place of the dtype, and the rounding of f32 sums of numbers up to about `magnitude`.
fn assert_rounded(what: &str, got: &Tensor, want: &Tensor, magnitude: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let half_unit = if got.dtype() == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    for (i, (got, want)) in values(got).into_iter().zip(values(want)).enumerate() {
        // The last term covers subnormal f16 numbers, whose steps are fixed.
        let tolerance = 1.002 * half_unit * want.abs() + 4e-6 * magnitude + 3e-8;
        assert!((got - want).abs() <= tolerance, "{what}, element {i}: got {got}, expected {want} within {tolerance}");
    }
}

/// Fills memory of `elements` with NaN and releases it, so that outputs reuse it and unwritten elements stay NaN.
fn poison(device: &Device, elements: &[usize], dtype: DType) {
    let filled: Vec<Tensor> =
        elements.iter().map(|&count| Tensor::full(f32::NAN, count, device).unwrap().to_dtype(dtype).unwrap()).collect();
    drop(filled);
}

pub fn cases(runner: &mut Runner) {
    for dtype in [DType::BF16, DType::F16] {
        norms(runner, dtype);
        gates(runner, dtype);
        sums(runner, dtype);
        rotations(runner, dtype);
        decoding(runner, dtype);
        quantised(runner, dtype);
        joined_heads(runner, dtype);
    }
    runner.case("fused sizes that the kernels do not support", |runner| unknown_sizes(&runner.device));
    runner.case("fused misfits are refused", |runner| misfits(&runner.device));
    runner.case("fused memory of the device", |runner| {
        let before = DeviceMemory::of(&runner.device).unwrap().unwrap();
        assert!(before.free > 0 && before.free <= before.total, "{before:?}");
        let held = Tensor::zeros(1 << 28, DType::F32, &runner.device).unwrap();
        let after = DeviceMemory::of(&runner.device).unwrap().unwrap();
        // Pools round up, and other processes may use the GPU.
        assert!(before.free - after.free.min(before.free) >= 1 << 29, "{before:?}, then {after:?}");
        drop(held);
    });
}

fn norms(runner: &mut Runner, dtype: DType) {
    for (rows, width) in [
        (1, 8),
        (3, 64),
        (129, 264),
        (7, 1024),
        (1000, 4096),
        (33, 4104),
        (2, 5120),
        (65, 14336),
        (2, 32768),
        // Too wide for the kernel.
        (2, 40000),
    ] {
        runner.case(&format!("fused rms norm {rows} x {width} {dtype:?}"), |runner| {
            let device = &runner.device;
            let (x, x_cpu) = pair(device, &[rows, width], dtype, 1, 4.0);
            let (delta, delta_cpu) = pair(device, &[rows, width], dtype, 2, 3.0);
            let (weight, weight_cpu) = pair(device, &[width], dtype, 3, 2.0);
            poison(device, &[rows * width], dtype);
            let normed = rms_norm(&x, &weight, 1e-5).unwrap();
            let exact = |x: &Tensor| rms_norm(x, &weight_cpu, 1e-5).unwrap();
            let tolerance = if width <= 32768 { 1.0 } else { 1e3 };
            assert_rounded("norm", &normed, &exact(&x_cpu), tolerance);

            poison(device, &[rows * width; 2], dtype);
            let before = bits(&x);
            let (sum, normed) = add_rms_norm(x.clone(), &delta, &weight, 1e-5).unwrap();
            let sum_cpu = (x_cpu + delta_cpu).unwrap().to_dtype(dtype).unwrap();
            assert!(bits(&sum) == bits(&sum_cpu), "the sum is rounded once");
            assert_rounded("norm of the sum", &normed, &exact(&sum_cpu.to_dtype(DType::F32).unwrap()), tolerance);
            assert!(bits(&x) == before, "the input was changed");
        });
    }
    runner.case(&format!("fused rms norm of a view {dtype:?}"), |runner| {
        let (x, x_cpu) = pair(&runner.device, &[2, 9, 256], dtype, 4, 4.0);
        let (weight, weight_cpu) = pair(&runner.device, &[256], dtype, 5, 2.0);
        let view = |x: &Tensor| x.narrow(1, 3, 5).unwrap();
        let got = rms_norm(&view(&x), &weight, 1e-6).unwrap();
        let want = rms_norm(&view(&x_cpu).contiguous().unwrap(), &weight_cpu, 1e-6).unwrap();
        assert_rounded("norm", &got, &want, 1.0);
    });
}

fn gates(runner: &mut Runner, dtype: DType) {
    for (rows, width) in [(1, 8), (2, 768), (1000, 1000), (5, 8200), (300, 14336), (1, 14336)] {
        runner.case(&format!("fused silu {rows} x {width} {dtype:?}"), |runner| {
            let device = &runner.device;
            // The range includes a flat sigmoid and an overflowing exp.
            let (joined, joined_cpu) = pair(device, &[rows, 2 * width], dtype, 6, 200.0);
            poison(device, &[rows * width], dtype);
            let stacked = |tensor| Stacked::joined(tensor, &[width, width]).unwrap();
            let got = silu_mul(stacked(joined)).unwrap();
            assert_rounded("silu", &got, &silu_mul(stacked(joined_cpu)).unwrap(), 1e-2);
        });
    }
}

/// Outputs that are added in place, to their rows and no others.
fn sums(runner: &mut Runner, dtype: DType) {
    for (size_in, size_out, rows) in [(64, 128, 128), (8, 8, 300), (1000, 136, 129), (4096, 24, 500), (72, 1000, 2200)]
    {
        runner.case(&format!("fused sums of {rows} x {size_in} x {size_out} {dtype:?}"), |runner| {
            let (x, x_cpu) = pair(&runner.device, &[rows, size_in], dtype, 21, 1.0);
            let (weight, weight_cpu) = pair(&runner.device, &[size_out, size_in], dtype, 22, 0.1);
            let (all, all_cpu) = pair(&runner.device, &[rows + 5, size_out], dtype, 23, 4.0);
            let layer = Linear::Dense(candle_nn::Linear::new(weight.clone(), None));
            let part = |all: &Tensor| all.narrow(0, 2, rows).unwrap();
            let sum = part(&all);
            let adding = layer.adding(&sum).unwrap();
            adding.add_to(&x.clone().into(), &sum).unwrap();
            let product = x_cpu.matmul(&weight_cpu.t().unwrap()).unwrap();
            let want = (part(&all_cpu) + &product).unwrap();
            // cuBLAS rounds the product, or the sum alone.
            let half_unit = if dtype == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
            let assert_sums = |got: &Tensor| {
                let (got, want, product) = (values(got), values(&want), values(&product));
                for (i, ((got, want), product)) in got.iter().zip(&want).zip(&product).enumerate() {
                    let tolerance = 1.01 * half_unit * (want.abs() + product.abs()) + 1e-4;
                    assert!((got - want).abs() <= tolerance, "{i}: got {got}, expected {want} within {tolerance}");
                }
            };
            assert_sums(&sum);
            for (first, len) in [(0, 2), (rows + 2, 3)] {
                let others = |all: &Tensor| all.narrow(0, first, len).unwrap().to_dtype(dtype).unwrap();
                assert!(bits(&others(&all)) == bits(&others(&all_cpu)), "other rows");
            }
            // One slice of the rows after the other, as a long MLP does, in a thread that has not used the GPU.
            let again = all_cpu.to_dtype(dtype).unwrap().to_device(&runner.device).unwrap();
            let slice = |x: &Tensor, (first, len)| x.narrow(0, first, len).unwrap();
            std::thread::scope(|scope| {
                let add = || {
                    for range in [(0, 120), (120, rows - 120)] {
                        adding.add_to(&slice(&x, range).into(), &slice(&part(&again), range)).unwrap();
                    }
                };
                scope.spawn(add).join().unwrap();
            });
            assert_sums(&part(&again));

            // Other layers and sums take two steps.
            let biased = candle_nn::Linear::new(weight.clone(), Some(weight.get_on_dim(1, 0).unwrap()));
            assert!(Linear::Dense(biased).adding(&sum).is_none(), "a bias");
            assert!(layer.adding(&slice(&all, (0, 127))).is_none(), "few rows");
            assert!(layer.adding(&all_cpu).is_none(), "the CPU");
            let transposed = Tensor::zeros((size_out, rows), dtype, &runner.device).unwrap().t().unwrap();
            assert!(layer.adding(&transposed).is_none(), "not contiguous");
            let in_f32 = x.to_dtype(DType::F32).unwrap();
            for (x, sum) in [(slice(&x, (0, 5)), &sum), (in_f32, &sum), (x.clone(), &all), (x, &transposed)] {
                let error = adding.add_to(&x.into(), sum).unwrap_err().to_string();
                assert!(error.contains("expected rows (.., "), "{error}");
            }
        });
    }
}

fn joined_heads(runner: &mut Runner, dtype: DType) {
    for (ranks, rows, groups, width) in [(1, 3, 2, 8), (2, 1, 2, 128), (4, 1027, 8, 512), (2, 65, 8, 24), (3, 4, 6, 4)]
    {
        runner.case(&format!("fused heads of {ranks} ranks, {rows} x {groups} x {width} {dtype:?}"), |runner| {
            let dims = [ranks * rows, groups / ranks * width];
            let (x, x_cpu) = pair(&runner.device, &dims, dtype, 9, 1.0);
            // 5 and the numbers of groups have no common divisor.
            let slots: Vec<u32> = (0..groups as u32).map(|head| (5 * head + 1) % groups as u32).collect();
            let on = |device: &Device| Tensor::new(slots.clone(), device).unwrap();
            poison(&runner.device, &[ranks * rows * groups * width / ranks], dtype);
            let got = join_heads(&x, ranks, &on(&runner.device)).unwrap();
            let want = join_heads(&x_cpu, ranks, &on(&Device::Cpu)).unwrap();
            assert_eq!(got.dims(), want.dims());
            assert!(bits(&got) == bits(&want.to_dtype(dtype).unwrap()));
        });
    }
}

/// A layer whose weights are quantised, against the product with the dequantised weights.
fn quantised(runner: &mut Runner, dtype: DType) {
    use GgmlDType::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
    for block_type in [Q4_0, Q4_1, Q8_0, Q4K, Q5K, Q6K] {
        runner.case(&format!("fused quantised {block_type:?} {dtype:?}"), |runner| {
            let (size_in, sizes) = (512, [192, 64]);
            let weights = sizes.map(|size| pair(&Device::Cpu, &[size, size_in], dtype, size as u64, 0.1).1);
            let on_gpu = weights.each_ref().map(|weight| {
                Linear::Quantised(Arc::new(QTensor::quantize_onto(weight, block_type, &runner.device).unwrap()), None)
            });
            let dense = weights.map(|weight| QTensor::quantize(&weight, block_type).unwrap().dequantize(&Device::Cpu));
            let dense = dense.map(|weight| Linear::Dense(candle_nn::Linear::new(weight.unwrap(), None)));
            let (gpu, cpu) = (StackedLinear::new(on_gpu.into()).unwrap(), StackedLinear::new(dense.into()).unwrap());
            for rows in [1, 8, 9, 300] {
                let (x, x_cpu) = pair(&runner.device, &[1, rows, size_in], dtype, rows as u64, 1.0);
                let outputs = gpu.forward(&x.into()).unwrap().into_parts().unwrap();
                // Inputs of few rows are rounded to 8 bits; the others lose the 8 or 11 bits of the dtype.
                let tolerance = if rows <= 8 { 2e-2 } else { 5e-3 };
                for (got, want) in outputs.iter().zip(cpu.forward(&x_cpu.into()).unwrap().into_parts().unwrap()) {
                    let error = relative_l2(&values(got), &values(&want));
                    assert!(error > 0.0 && error < tolerance, "{rows} rows: {error}");
                }
            }
        });
    }
}

fn rotations(runner: &mut Runner, dtype: DType) {
    // (batch, len, query heads, kv heads, head_dim, row of the cache, position)
    for (batch, len, num_heads, num_kv_heads, head_dim, start, position) in [
        (1, 1, 4, 2, 128, 0, 0),
        (2, 5, 4, 2, 64, 3, 3),
        (1, 130, 32, 8, 128, 70, 131_000),
        (2, 33, 3, 1, 128, 1, 499_900),
        (1, 67, 7, 7, 64, 0, 524_000),
        (2, 9, 1, 1, 64, 11, 1_000_000),
        (1, 40, 64, 8, 128, 2, 40_000),
    ] {
        for with_norm in [false, true] {
            let name = format!(
                "fused rotation {batch} x {len} of {num_heads} + {num_kv_heads} heads D{head_dim} {dtype:?} \
                 at {position} norm {with_norm}"
            );
            runner.case(&name, |runner| {
                let device = &runner.device;
                let heads = Heads { num_heads, num_kv_heads, head_dim };
                let sizes = [num_heads, num_kv_heads, num_kv_heads].map(|heads| heads * head_dim);
                let (qkv, qkv_cpu) = pair(device, &[batch, len, sizes.iter().sum()], dtype, 7, 4.0);
                let (q_norm, q_norm_cpu) = pair(device, &[head_dim], dtype, 8, 3.0);
                let (k_norm, k_norm_cpu) = pair(device, &[head_dim], dtype, 9, 3.0);
                let capacity = start + len + 4;
                let run = |qkv: Tensor, [q, k]: [&Tensor; 2]| {
                    let device = qkv.device().clone();
                    let nan = || {
                        let shape = (batch, capacity, num_kv_heads, head_dim);
                        Tensor::full(f32::NAN, shape, &device).unwrap().to_dtype(qkv.dtype()).unwrap()
                    };
                    let (k_cache, v_cache) = (nan(), nan());
                    let frequencies =
                        (0..head_dim / 2).map(|i| 5e5f64.powf(-2.0 * i as f64 / head_dim as f64) as f32).collect();
                    let rotary = Rotary::new(frequencies, 1.1, qkv.dtype(), &device).unwrap();
                    let rotation = rotary.rows(position, len).unwrap();
                    poison(&device, &[batch * len * num_heads * head_dim], qkv.dtype());
                    let norm = with_norm.then_some(QkNorm { q, k, eps: 1e-6 });
                    let cache = LayerCache { k: &k_cache, v: &v_cache, start };
                    let stacked = Stacked::joined(qkv, &sizes).unwrap();
                    let q = rotate_into_cache(stacked, heads, norm, &rotation, cache).unwrap();
                    (q, k_cache, v_cache)
                };
                let (q, k, v) = run(qkv, [&q_norm, &k_norm]);
                let (q_cpu, k_cpu, v_cpu) = run(qkv_cpu, [&q_norm_cpu, &k_norm_cpu]);
                let new = |cache: &Tensor| cache.narrow(1, start, len).unwrap();
                assert_rounded("q", &q, &q_cpu, 4.0);
                assert_rounded("k", &new(&k), &new(&k_cpu), 4.0);
                assert!(bits(&new(&v)) == bits(&new(&v_cpu)), "values are copied");
                for cache in [&k, &v] {
                    for (first, count) in [(0, start), (start + len, 4)].into_iter().filter(|(_, count)| *count > 0) {
                        let untouched = values(&cache.narrow(1, first, count).unwrap());
                        assert!(untouched.iter().all(|x| x.is_nan()), "other rows of the cache were written");
                    }
                }
            });
        }
    }
}

fn decoding(runner: &mut Runner, dtype: DType) {
    for (batch, k_len, [num_heads, num_kv_heads], head_dim) in [
        (1, 1, [4, 2], 128),
        (2, 5, [8, 2], 64),
        (2, 1000, [4, 4], 128),
        (1, 5000, [8, 1], 128),
        (2, 40_000, [32, 8], 128),
    ] {
        let name =
            format!("fused decoding of {batch} over {k_len}, {num_heads}/{num_kv_heads} heads D{head_dim} {dtype:?}");
        runner.case(&name, |runner| {
            let device = &runner.device;
            let (q, q_cpu) = pair(device, &[batch, 1, num_heads, head_dim], dtype, 10, 8.0);
            // Views of longer caches, as in a decoder.
            let side = |seed| {
                let (cache, cache_cpu) = pair(device, &[batch, k_len + 7, num_kv_heads, head_dim], dtype, seed, 2.0);
                (cache.narrow(1, 0, k_len).unwrap(), cache_cpu.narrow(1, 0, k_len).unwrap())
            };
            let ((k, k_cpu), (v, v_cpu)) = (side(11), side(12));
            let scale = 1.0 / (head_dim as f32).sqrt();
            poison(device, &[batch * num_heads * head_dim], dtype);
            let got = decode_attn(&q, &k, &v, scale).unwrap();
            let want = decode_attn(&q_cpu, &k_cpu, &v_cpu, scale).unwrap();
            assert_eq!(got.dims(), want.dims());
            let error = relative_l2(&values(&got), &values(&want));
            let tolerance = if dtype == DType::BF16 { 5e-3 } else { 8e-4 };
            assert!(error < tolerance, "relative error {error:.2e}");
        });
    }
}

/// f32, odd widths and other head sizes use Candle's ops.
fn unknown_sizes(device: &Device) {
    for (dtype, head_dim, width) in [(DType::F32, 128, 256), (DType::BF16, 96, 100), (DType::F16, 32, 12)] {
        let both = [device, &Device::Cpu].map(|device| {
            let numbers = |dims: &[usize], seed| {
                let (_, exact) = pair(&Device::Cpu, dims, DType::BF16, seed, 4.0);
                exact.to_dtype(dtype).unwrap().to_device(device).unwrap()
            };
            let normed = rms_norm(&numbers(&[3, width], 1), &numbers(&[width], 2), 1e-5).unwrap();
            let gated = silu_mul(Stacked::joined(numbers(&[3, 2 * width], 3), &[width, width]).unwrap()).unwrap();
            let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim };
            let cache = || Tensor::zeros((1, 6, 1, head_dim), dtype, device).unwrap();
            let (k, v) = (cache(), cache());
            let frequencies = (0..head_dim / 2).map(|i| 0.9f32.powi(i as i32)).collect();
            let rotation = Rotary::new(frequencies, 1.0, dtype, device).unwrap().rows(100, 5).unwrap();
            let qkv = Stacked::joined(numbers(&[1, 5, 4 * head_dim], 4), &[2 * head_dim, head_dim, head_dim]).unwrap();
            let norms = [numbers(&[head_dim], 5), numbers(&[head_dim], 6)];
            let norm = QkNorm { q: &norms[0], k: &norms[1], eps: 1e-6 };
            let cache = LayerCache { k: &k, v: &v, start: 1 };
            let q = rotate_into_cache(qkv, heads, Some(norm), &rotation, cache).unwrap();
            [normed, gated, q, k, v].map(|tensor| values(&tensor))
        });
        let [on_gpu, on_cpu] = both;
        for (got, want) in on_gpu.into_iter().flatten().zip(on_cpu.into_iter().flatten()) {
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 0.03 };
            assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{dtype:?}: got {got}, expected {want}");
        }
    }
}

fn misfits(device: &Device) {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::BF16, device).unwrap();
    let x = zeros(&[4, 64]);
    for (what, refused) in [
        ("weight", rms_norm(&x, &zeros(&[32]), 1e-5).map(|_| ())),
        ("dtype", rms_norm(&x, &zeros(&[64]).to_dtype(DType::F32).unwrap(), 1e-5).map(|_| ())),
        ("device", rms_norm(&x, &zeros(&[64]).to_device(&Device::Cpu).unwrap(), 1e-5).map(|_| ())),
        ("delta", add_rms_norm(x.clone(), &zeros(&[2, 64]), &zeros(&[64]), 1e-5).map(|_| ())),
        ("gates", Stacked::joined(x.clone(), &[32, 16]).map(|_| ())),
        ("one output", silu_mul(Stacked::joined(x.clone(), &[64]).unwrap()).map(|_| ())),
    ] {
        assert!(refused.is_err(), "{what}");
    }
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 64 };
    let rotary = Rotary::new(vec![1.0; 32], 1.0, DType::BF16, device).unwrap();
    let refused = |cache: LayerCache, rows: usize| {
        let qkv = Stacked::joined(zeros(&[1, 3, 256]), &[128, 64, 64]).unwrap();
        let rotation = rotary.rows(0, rows).unwrap();
        rotate_into_cache(qkv, heads, None, &rotation, cache).is_err()
    };
    let (k, v) = (zeros(&[1, 5, 1, 64]), zeros(&[1, 5, 1, 64]));
    assert!(!refused(LayerCache { k: &k, v: &v, start: 2 }, 3));
    assert!(refused(LayerCache { k: &k, v: &v, start: 3 }, 3), "beyond the cache");
    assert!(refused(LayerCache { k: &k, v: &v, start: 0 }, 4), "a rotation of other positions");
    assert!(refused(LayerCache { k: &k, v: &k.narrow(1, 0, 5).unwrap(), start: 0 }, 3), "one memory for both");
}
