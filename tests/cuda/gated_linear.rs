//! The gated product in 16 bits against f64, and against the two steps that other GPUs and few rows take.

use candle_core::{DType, Device, Tensor};
use s2o_models::fused::{GatedLinear, Linear, LinearPrecision, Rows, Stacked, silu_mul, supports_int8};
use s2o_testkit::{noise, relative_l2};

use crate::Runner;
use crate::exact::values;

fn numbers(device: &Device, dims: &[usize], dtype: DType, seed: u64, scale: f32) -> Tensor {
    let numbers: Vec<f32> = noise(dims.iter().product(), seed).into_iter().map(|x| x * scale).collect();
    Tensor::from_vec(numbers, dims, device).unwrap().to_dtype(dtype).unwrap()
}

fn layer(weights: &[Tensor; 2]) -> GatedLinear {
    let [gate, up] = weights.clone().map(|weight| Linear::Dense(candle_nn::Linear::new(weight, None)));
    GatedLinear::new(gate, up, LinearPrecision::AsRead).unwrap()
}

pub fn cases(runner: &mut Runner) {
    for dtype in [DType::BF16, DType::F16] {
        // Sizes that fill tiles, that end inside of one, and that the kernel does not take (20). The last has more tiles than
        // an H200 has multiprocessors.
        let few = [3, 129];
        for (size_in, size, rows) in [
            (64, 128, few),
            (8, 8, few),
            (1000, 136, few),
            (4096, 384, few),
            (72, 1000, few),
            (64, 20, few),
            (64, 1024, [2, 1100]),
        ] {
            runner.case(&format!("gated linear {size_in} x {size} {dtype:?}"), |runner| {
                let weights = [1, 2].map(|seed| numbers(&runner.device, &[size, size_in], dtype, seed, 0.1));
                against_f64(&runner.device, &weights, rows, dtype);
            });
        }
        runner.case(&format!("gated linear, not finite {dtype:?}"), |runner| not_finite(&runner.device, dtype));
    }
}

fn against_f64(device: &Device, weights: &[Tensor; 2], [batch, len]: [usize; 2], dtype: DType) {
    let (size, size_in) = weights[0].dims2().unwrap();
    let layer = layer(weights);
    let x = numbers(device, &[batch, len, size_in], dtype, 3, 1.0);
    // Outputs reuse this memory, so elements that no kernel writes stay NaN.
    drop(Tensor::full(f32::NAN, (batch * len, size), device).unwrap().to_dtype(dtype).unwrap());
    let whole = layer.forward(&x.clone().into()).unwrap();
    assert_eq!(whole.dims(), [batch, len, size]);
    let whole = values(&whole);
    let rows: Vec<f64> = values(&x).into_iter().map(f64::from).collect();
    let matrices = [0, 1].map(|i| values(&weights[i]).into_iter().map(f64::from).collect::<Vec<_>>());
    let product = |row: &[f64], matrix: &[f64], output: usize| -> f64 {
        row.iter().zip(&matrix[output * size_in..]).map(|(x, w)| x * w).sum()
    };
    let want: Vec<f32> = rows
        .chunks(size_in)
        .flat_map(|row| (0..size).map(move |output| (row, output)))
        .map(|(row, output)| {
            let [gate, up] = [0, 1].map(|i| product(row, &matrices[i], output));
            (gate / (1.0 + (-gate).exp()) * up) as f32
        })
        .collect();
    let limit = if dtype == DType::BF16 { 4e-3 } else { 1e-3 };
    let error = relative_l2(&whole, &want);
    assert!(error < limit, "{size_in} x {size}: {error}");
    let flat = x.reshape((batch * len, size_in)).unwrap();
    for rows in [1, 127, 128, 129, 300] {
        let got = values(&layer.forward(&flat.narrow(0, 0, rows).unwrap().into()).unwrap());
        assert!(relative_l2(&got, &want[..rows * size]) < 2.0 * limit, "{rows} rows of {size_in} x {size}");
        let is_one_kernel = rows >= 128 && size.is_multiple_of(8) && supports_int8(device, dtype);
        assert!(!is_one_kernel || got == whole[..rows * size], "{rows} rows: other rows change a row");
    }
}

/// What is not finite reaches its own row only.
fn not_finite(device: &Device, dtype: DType) {
    let weights = [4, 5].map(|seed| numbers(device, &[64, 64], dtype, seed, 1.0));
    let layer = layer(&weights);
    let mut x = noise(200 * 64, 6);
    x[130 * 64 + 7] = f32::NAN;
    let x = Tensor::from_vec(x, (200, 64), device).unwrap().to_dtype(dtype).unwrap();
    let out = values(&layer.forward(&Rows::from(x.clone())).unwrap());
    for (row, out) in out.chunks(64).enumerate() {
        assert_eq!(out.iter().all(|x| x.is_finite()), row != 130, "row {row}");
    }
    // The gate in a kernel of its own rounds gate and up first.
    let joined = x.matmul(&Tensor::cat(&weights, 0).unwrap().t().unwrap()).unwrap();
    let two_steps = values(&silu_mul(Stacked::joined(joined, &[64, 64]).unwrap()).unwrap());
    let error = relative_l2(&out[..130 * 64], &two_steps[..130 * 64]);
    assert!(error < if dtype == DType::BF16 { 8e-3 } else { 1e-3 }, "{error}");
}
