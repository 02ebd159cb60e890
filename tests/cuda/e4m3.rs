//! Linear layers in e4m3 against f64, and their fused steps against the separate ones. Builds for other GPUs than the
//! H100 and H200 refuse them.

use candle_core::{DType, Device, Tensor};
use s2o_models::fused::{
    E4m3, E4m3Linear, Linear, LinearPrecision, Rows, Stacked, StackedLinear, add_rms_norm, rms_norm, rms_norm_e4m3,
    silu_mul, silu_mul_e4m3, supports_e4m3,
};
use s2o_models::{LoadOptions, ModelError, ModelSource};
use s2o_testkit::{noise, relative_l2};

use crate::Runner;
use crate::exact::values;

/// The number that a byte of e4m3 stands for: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa.
fn decode(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if byte & 128 == 0 { magnitude } else { -magnitude }
}

/// Bytes and scales.
fn parts(x: &E4m3) -> (Vec<u8>, Vec<f32>) {
    (x.values().flatten_all().unwrap().to_vec1().unwrap(), x.scales().to_vec1().unwrap())
}

fn dequantised(x: &E4m3) -> Vec<f64> {
    let (bytes, scales) = parts(x);
    let width = bytes.len() / scales.len();
    bytes.iter().enumerate().map(|(i, &byte)| decode(byte) * f64::from(scales[i / width])).collect()
}

fn numbers(device: &Device, dims: &[usize], dtype: DType, seed: u64) -> Tensor {
    let numbers = noise(dims.iter().product(), seed);
    Tensor::from_vec(numbers, dims, device).unwrap().to_dtype(dtype).unwrap()
}

pub fn cases(runner: &mut Runner) {
    if !supports_e4m3(&runner.device, DType::BF16) {
        runner.case("e4m3 is refused on this build", |runner| {
            let x = numbers(&runner.device, &[2, 64], DType::BF16, 1);
            assert!(E4m3::quantise(&x).is_err());
            let options = fp8(&runner.device);
            let error = ModelSource::Embedded.load(&options, None).map(drop).unwrap_err();
            assert!(matches!(error, ModelError::Fp8 { .. }), "{error}");
        });
        return;
    }
    for dtype in [DType::BF16, DType::F16] {
        for (rows, width) in [(1, 16), (5, 272), (129, 4096), (3, 14336), (2, 32768)] {
            runner.case(&format!("e4m3 rows {rows} x {width} {dtype:?}"), |runner| {
                rounds_to_nearest(&numbers(&runner.device, &[rows, width], dtype, 3));
            });
        }
        runner.case(&format!("e4m3 fused steps {dtype:?}"), |runner| fused_steps(&runner.device, dtype));
        runner.case(&format!("e4m3 products {dtype:?}"), |runner| products(&runner.device, dtype));
        runner.case(&format!("e4m3 not finite {dtype:?}"), |runner| not_finite(&runner.device, dtype));
    }
    runner.case("e4m3 misfits are refused", |runner| misfits(&runner.device));
    runner.case("e4m3 needle-11m", |runner| needle(&runner.device));
}

/// The largest entry of a row becomes 448, and every entry the nearest number.
fn rounds_to_nearest(x: &Tensor) {
    let quantised = E4m3::quantise(x).unwrap();
    let (bytes, scales) = parts(&quantised);
    let width = x.dim(1).unwrap();
    let all: Vec<f64> = (0..=255).map(decode).filter(|number| number.is_finite()).collect();
    for (row, (x, bytes)) in values(x).chunks(width).zip(bytes.chunks(width)).enumerate() {
        let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!((scales[row] - most / 448.0).abs() <= most * 1e-7, "scale {} of {most}", scales[row]);
        assert!(bytes.iter().any(|&byte| decode(byte).abs() == 448.0), "row {row} does not reach 448");
        for (&x, &byte) in x.iter().zip(bytes) {
            let wanted = f64::from(x) * 448.0 / f64::from(most);
            let got = (decode(byte) - wanted).abs();
            let best = all.iter().map(|number| (number - wanted).abs()).fold(f64::MAX, f64::min);
            // Between two numbers, the products in f32 may fall on either side.
            assert!(got <= best + 1e-6 * wanted.abs(), "{x} of {most}: got {}", decode(byte));
        }
    }
}

fn fused_steps(device: &Device, dtype: DType) {
    for (rows, width) in [(1, 16), (33, 512), (200, 4096), (7, 14336)] {
        let (x, delta) = (numbers(device, &[rows, width], dtype, 4), numbers(device, &[rows, width], dtype, 5));
        let weight = numbers(device, &[width], dtype, 6);
        let (sum, normed) = rms_norm_e4m3(x.clone(), Some(&delta), &weight, 1e-5).unwrap();
        let (want_sum, want) = add_rms_norm(x.clone(), &delta, &weight, 1e-5).unwrap();
        assert!(values(&sum) == values(&want_sum), "{rows} x {width}: the sum");
        assert!(parts(&normed) == parts(&E4m3::quantise(&want).unwrap()), "{rows} x {width}: the norm of the sum");
        let (same, normed) = rms_norm_e4m3(x.clone(), None, &weight, 1e-5).unwrap();
        assert!(values(&same) == values(&x), "{rows} x {width}: x without a delta");
        let want = rms_norm(&x, &weight, 1e-5).unwrap();
        assert!(parts(&normed) == parts(&E4m3::quantise(&want).unwrap()), "{rows} x {width}: the norm");
        let joined = (numbers(device, &[rows, 2 * width], dtype, 7) * 8.0).unwrap();
        let stacked = || Stacked::joined(joined.clone(), &[width, width]).unwrap();
        let (gated, want) = (silu_mul_e4m3(stacked()).unwrap(), silu_mul(stacked()).unwrap());
        assert!(parts(&gated) == parts(&E4m3::quantise(&want).unwrap()), "{rows} x {width}: the gate");
    }
}

fn products(device: &Device, dtype: DType) {
    for (size_in, size_out) in [(16, 16), (512, 48), (4112, 272), (14336, 64)] {
        let weight = (numbers(device, &[size_out, size_in], dtype, 8) * 0.1).unwrap();
        let bias = numbers(device, &[size_out], dtype, 9);
        let of_weight = dequantised(&E4m3::quantise(&weight).unwrap());
        let biases = values(&bias);
        let layer = E4m3Linear::new(&candle_nn::Linear::new(weight, Some(bias))).unwrap();
        for rows in [1, 2, 7, 8, 9, 17, 300] {
            let x = numbers(device, &[1, rows, size_in], dtype, rows as u64);
            let quantised = E4m3::quantise(&x).unwrap();
            let exact: Vec<f64> = values(&x).into_iter().map(f64::from).collect();
            let of_rows = |x: &[f64]| -> Vec<f32> {
                let output = |x: &[f64], output: usize| {
                    let weight = &of_weight[output * size_in..][..size_in];
                    x.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>() + f64::from(biases[output])
                };
                x.chunks(size_in).flat_map(|x| (0..size_out).map(|o| output(x, o) as f32)).collect()
            };
            let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-3 };
            let close = |what: &str, rows_in: &Rows, want: &[f32]| {
                let got = layer.forward(rows_in).unwrap();
                assert_eq!(got.dims(), [1, rows, size_out]);
                let error = relative_l2(&values(&got), want);
                assert!(error < tolerance, "{what}, {rows} x {size_in} x {size_out}: {error}");
            };
            let narrow = dequantised(&quantised);
            close("quantised rows", &Rows::E4m3(quantised), &of_rows(&narrow));
            // Up to eight rows stay in 16 bits.
            let kept = if rows <= 8 { &exact } else { &narrow };
            close("rows", &x.into(), &of_rows(kept));
        }
    }
}

/// What is not finite reaches its own row only.
fn not_finite(device: &Device, dtype: DType) {
    let layer = E4m3Linear::new(&candle_nn::Linear::new(numbers(device, &[32, 64], dtype, 10), None)).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for rows in [3, 20] {
            let mut x = noise(rows * 64, 11);
            x[64 + 5] = bad;
            // A row of zeros, and one whose numbers are too small for a factor.
            x[2 * 64..].iter_mut().take(64).for_each(|x| *x *= 0.0);
            let x = Tensor::from_vec(x, (rows, 64), device).unwrap().to_dtype(dtype).unwrap();
            let quantised = Rows::E4m3(E4m3::quantise(&x).unwrap());
            for (what, rows_in) in [("quantised", quantised), ("as they are", x.into())] {
                let out = values(&layer.forward(&rows_in).unwrap());
                for (row, out) in out.chunks(32).enumerate() {
                    let finite = out.iter().all(|x| x.is_finite());
                    assert_eq!(finite, row != 1, "{bad} {what}, row {row} of {rows}");
                    assert!(row != 2 || out.iter().all(|&x| x == 0.0), "{bad} {what}: zeros");
                }
            }
        }
    }
    let tiny = Tensor::full(1e-38f32, (2, 64), device).unwrap().to_dtype(DType::BF16).unwrap();
    assert!(dequantised(&E4m3::quantise(&tiny).unwrap()).iter().all(|&x| x == 0.0), "tiny numbers");
}

fn misfits(device: &Device) {
    let bf16 = |dims: &[usize]| numbers(device, dims, DType::BF16, 12);
    let linear = |dims: &[usize]| candle_nn::Linear::new(bf16(dims), None);
    assert!(E4m3::quantise(&bf16(&[2, 40])).is_err(), "a width of 40");
    assert!(E4m3::quantise(&bf16(&[1, 40000])).is_err(), "a width of 40000");
    assert!(E4m3::quantise(&bf16(&[2, 64]).to_dtype(DType::F32).unwrap()).is_err(), "f32");
    assert!(E4m3::quantise(&bf16(&[2, 64]).to_device(&Device::Cpu).unwrap()).is_err(), "on the CPU");
    assert!(E4m3Linear::new(&linear(&[40, 64])).is_err(), "40 outputs");
    let layer = E4m3Linear::new(&linear(&[32, 64])).unwrap();
    assert!(layer.forward(&bf16(&[2, 32]).into()).is_err(), "rows of another width");
    let dense = StackedLinear::new(vec![Linear::Dense(linear(&[32, 64]))]).unwrap();
    let rows = Rows::E4m3(E4m3::quantise(&bf16(&[2, 64])).unwrap());
    assert!(dense.forward(&rows).is_err(), "quantised rows for another layer");
    assert!(dense.in_precision(LinearPrecision::Fp8).unwrap().forward(&rows).is_ok());
}

fn fp8(device: &Device) -> LoadOptions {
    LoadOptions {
        device: device.clone(),
        dtype: Some(DType::BF16),
        linear: LinearPrecision::Fp8,
        ..LoadOptions::default()
    }
}

/// Logits of a prompt and of decoding.
fn needle(device: &Device) {
    let narrow = ModelSource::Embedded.load(&fp8(device), None).unwrap();
    let options = LoadOptions { linear: LinearPrecision::AsRead, ..fp8(device) };
    let wide = ModelSource::Embedded.load(&options, None).unwrap();
    assert_eq!(narrow.decoder.precision(), "bf16 with fp8 linear layers");
    let prompt = s2o_eval::tasks::passkey::build(&wide.tokenizer, 3000, 0.4, 7).unwrap();
    let [got, want] = [&narrow, &wide].map(|model| {
        let mut cache = model.decoder.new_cache(1, prompt.tokens.len() + 1).unwrap();
        let tokens = model.prompt(&prompt.tokens).unwrap();
        let options = s2o_models::PrefillOptions::new().num_logits(64);
        let prefilled = model.decoder.prefill(&tokens, &mut cache, &candle_s2o::Dense, options).unwrap().logits;
        let token = Tensor::new(&[[prompt.tokens[0]]], device).unwrap();
        [prefilled, model.decoder.decode(&token, &mut cache).unwrap()].map(|logits| values(&logits))
    });
    for (what, got, want) in [("prefill", &got[0], &want[0]), ("decoding", &got[1], &want[1])] {
        let error = relative_l2(got, want);
        println!("e4m3 needle-11m, {what}: logits off by {error:.3}");
        assert!(error > 0.0 && error < 0.15, "{what}: {error}");
    }
}
