//! Linear layers in 8-bit integers against f64, and their fused steps against the separate ones. Builds for other GPUs than
//! the H100 and H200 refuse them.

use candle_core::{DType, Device, Tensor};
use s2o_models::fused::{
    Int8Linear, Linear, LinearPrecision, RotatedInt8, Rows, StackedLinear, add_rms_norm, rms_norm, rms_norm_int8,
    supports_int8,
};
use s2o_models::{LoadOptions, ModelError, ModelSource};
use s2o_testkit::{noise, relative_l2};

use crate::Runner;
use crate::exact::values;

/// Bytes and scales.
fn parts(x: &RotatedInt8) -> (Vec<u8>, Vec<f32>) {
    (x.values().flatten_all().unwrap().to_vec1().unwrap(), x.scales().to_vec1().unwrap())
}

fn dequantised(x: &RotatedInt8) -> Vec<f64> {
    let (bytes, scales) = parts(x);
    let width = bytes.len() / scales.len();
    bytes.iter().enumerate().map(|(i, &byte)| f64::from(byte as i8) * f64::from(scales[i / width])).collect()
}

/// Blocks of a row times a Hadamard matrix over the root of its size.
fn rotated(x: &[f32]) -> Vec<f64> {
    let block = (1 << x.len().trailing_zeros()).min(64);
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let entry = |x: &[f32], i: usize| {
        let sum: f64 = x.iter().enumerate().map(|(j, &x)| sign(i, j) * f64::from(x)).sum();
        sum / (block as f64).sqrt()
    };
    x.chunks(block).flat_map(|x| (0..block).map(|i| entry(x, i)).collect::<Vec<_>>()).collect()
}

fn numbers(device: &Device, dims: &[usize], dtype: DType, seed: u64) -> Tensor {
    let numbers = noise(dims.iter().product(), seed);
    Tensor::from_vec(numbers, dims, device).unwrap().to_dtype(dtype).unwrap()
}

pub fn cases(runner: &mut Runner) {
    if !supports_int8(&runner.device, DType::BF16) {
        runner.case("int8 layers are refused on this build", |runner| {
            let x = numbers(&runner.device, &[2, 64], DType::BF16, 1);
            assert!(RotatedInt8::quantise(&x).is_err());
            let error = ModelSource::Embedded.load(&options(&runner.device), None).map(drop).unwrap_err();
            assert!(matches!(error, ModelError::Int8Linear { .. }), "{error}");
        });
        return;
    }
    for dtype in [DType::BF16, DType::F16] {
        for (rows, width) in [(1, 16), (5, 272), (129, 4096), (3, 14336), (2, 32768)] {
            runner.case(&format!("int8 layers: rows {rows} x {width} {dtype:?}"), |runner| {
                rounds_to_nearest(&numbers(&runner.device, &[rows, width], dtype, 3));
            });
        }
        runner.case(&format!("int8 layers: fused steps {dtype:?}"), |runner| fused_steps(&runner.device, dtype));
        runner.case(&format!("int8 layers: products {dtype:?}"), |runner| products(&runner.device, dtype));
        runner.case(&format!("int8 layers: sums {dtype:?}"), |runner| sums(&runner.device, dtype));
        runner.case(&format!("int8 layers: gated products {dtype:?}"), |runner| gated_products(&runner.device, dtype));
        runner.case(&format!("int8 layers: not finite {dtype:?}"), |runner| not_finite(&runner.device, dtype));
    }
    runner.case("int8 layers: large entries", |runner| large_entries(&runner.device));
    runner.case("int8 layers: misfits are refused", |runner| misfits(&runner.device));
    runner.case("int8 layers: needle-11m", |runner| needle(&runner.device));
}

/// The largest entry of a rotated row becomes 127, and every entry the nearest integer.
fn rounds_to_nearest(x: &Tensor) {
    let quantised = RotatedInt8::quantise(x).unwrap();
    let (bytes, scales) = parts(&quantised);
    let width = x.dim(1).unwrap();
    for (row, (x, bytes)) in values(x).chunks(width).zip(bytes.chunks(width)).enumerate() {
        let x = rotated(x);
        let most = x.iter().fold(0f64, |most, x| most.max(x.abs()));
        let scale = f64::from(scales[row]);
        assert!((scale - most / 127.0).abs() <= most * 1e-6, "scale {scale} of {most}");
        assert!(bytes.iter().any(|&byte| (byte as i8).unsigned_abs() == 127), "row {row} does not reach 127");
        for (&x, &byte) in x.iter().zip(bytes) {
            // Near the middle of two integers, the sums in f32 may fall on either side.
            let got = f64::from(byte as i8);
            assert!((got - x * 127.0 / most).abs() <= 0.5 + 1e-3, "{x} of {most}: got {got}");
        }
    }
}

fn fused_steps(device: &Device, dtype: DType) {
    for (rows, width) in [(1, 16), (33, 512), (200, 4096), (7, 14336)] {
        let (x, delta) = (numbers(device, &[rows, width], dtype, 4), numbers(device, &[rows, width], dtype, 5));
        let weight = numbers(device, &[width], dtype, 6);
        let (sum, normed) = rms_norm_int8(x.clone(), Some(&delta), &weight, 1e-5).unwrap();
        let (want_sum, want) = add_rms_norm(x.clone(), &delta, &weight, 1e-5).unwrap();
        assert!(values(&sum) == values(&want_sum), "{rows} x {width}: the sum");
        assert!(
            parts(&normed) == parts(&RotatedInt8::quantise(&want).unwrap()),
            "{rows} x {width}: the norm of the sum"
        );
        let (same, normed) = rms_norm_int8(x.clone(), None, &weight, 1e-5).unwrap();
        assert!(values(&same) == values(&x), "{rows} x {width}: x without a delta");
        let want = rms_norm(&x, &weight, 1e-5).unwrap();
        assert!(parts(&normed) == parts(&RotatedInt8::quantise(&want).unwrap()), "{rows} x {width}: the norm");
    }
}

fn products(device: &Device, dtype: DType) {
    // The last has more tiles than an H200 has multiprocessors.
    for (size_in, size_out, most) in
        [(16, 16, 300), (512, 48, 300), (4112, 272, 300), (14336, 64, 300), (64, 2304, 2200)]
    {
        let weight = (numbers(device, &[size_out, size_in], dtype, 8) * 0.1).unwrap();
        let bias = numbers(device, &[size_out], dtype, 9);
        let biases = values(&bias);
        let as_f64 = |x: &Tensor| -> Vec<f64> { values(x).into_iter().map(f64::from).collect() };
        let weights = [dequantised(&RotatedInt8::quantise(&weight).unwrap()), as_f64(&weight)];
        let layer = Int8Linear::new(&candle_nn::Linear::new(weight, Some(bias))).unwrap();
        let all = numbers(device, &[1, most, size_in], dtype, 10);
        let whole = values(&layer.forward(&all.clone().into()).unwrap());
        for rows in [1, 2, 7, 8, 9, 17, 129, most] {
            let x = all.narrow(1, 0, rows).unwrap();
            let quantised = RotatedInt8::quantise(&x).unwrap();
            let got = layer.forward(&x.clone().into()).unwrap();
            assert_eq!(got.dims(), [1, rows, size_out]);
            let got = values(&got);
            assert!(got == whole[..rows * size_out], "{rows} x {size_in} x {size_out}: other rows change a row");
            let same = values(&layer.forward(&Rows::Int8(quantised.clone())).unwrap());
            assert!(got == same, "{rows} x {size_in} x {size_out}: quantised before");
            // Of the quantised numbers the product is exact but for its rounding; of the numbers themselves it is close.
            let tolerances = [if dtype == DType::BF16 { 4e-3 } else { 1e-3 }, 0.02];
            for ((x, weight), tolerance) in [dequantised(&quantised), as_f64(&x)].iter().zip(&weights).zip(tolerances) {
                let output = |x: &[f64], output: usize| {
                    let weight = &weight[output * size_in..][..size_in];
                    (x.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>() + f64::from(biases[output])) as f32
                };
                let output = &output;
                let want: Vec<f32> = x.chunks(size_in).flat_map(|x| (0..size_out).map(move |o| output(x, o))).collect();
                let error = relative_l2(&got, &want);
                assert!(error < tolerance, "{rows} x {size_in} x {size_out}: {error}");
            }
        }
    }
}

fn gated_products(device: &Device, dtype: DType) {
    for (size_in, size, most) in [(64, 16, 300), (4112, 272, 300), (64, 1024, 2200)] {
        let [gate, up] = [15, 16].map(|seed| (numbers(device, &[size, size_in], dtype, seed) * 0.1).unwrap());
        let layer = Int8Linear::gated(&gate, &up).unwrap();
        let weights = [&gate, &up].map(|weight| dequantised(&RotatedInt8::quantise(weight).unwrap()));
        let all = numbers(device, &[most, size_in], dtype, 17);
        let whole = values(&layer.forward(&all.clone().into()).unwrap());
        let quantised = dequantised(&RotatedInt8::quantise(&all).unwrap());
        let output = |x: &[f64], output: usize| {
            let of = |weight: &[f64]| -> f64 {
                x.iter().zip(&weight[output * size_in..][..size_in]).map(|(x, w)| x * w).sum()
            };
            let [gate, up] = [of(&weights[0]), of(&weights[1])];
            (gate / (1.0 + (-gate).exp()) * up) as f32
        };
        let want: Vec<f32> =
            quantised.chunks(size_in).flat_map(|x| (0..size).map(|o| output(x, o)).collect::<Vec<_>>()).collect();
        let error = relative_l2(&whole, &want);
        assert!(error < if dtype == DType::BF16 { 4e-3 } else { 1e-3 }, "{size_in} x {size}: {error}");
        for rows in [1, 8, 9, 129] {
            let got = values(&layer.forward(&all.narrow(0, 0, rows).unwrap().into()).unwrap());
            assert!(got == whole[..rows * size], "{rows} x {size_in} x {size}: other rows change a row");
        }
    }
}

/// Outputs added in place are those of two steps, and reach only their rows.
fn sums(device: &Device, dtype: DType) {
    // The last numbers are so small that sums in f16 are denormal.
    for (size_in, size_out, scale) in
        [(16, 16, 1.0), (512, 272, 1.0), (4112, 48, 1.0), (64, 2304, 1.0), (64, 272, 1e-5)]
    {
        let weight = (numbers(device, &[size_out, size_in], dtype, 18) * 0.1).unwrap();
        let layer = Int8Linear::new(&candle_nn::Linear::new(weight, None)).unwrap();
        for rows in [1, 8, 9, 129, 300, 2200] {
            let x = Rows::from((numbers(device, &[rows, size_in], dtype, 19) * scale).unwrap());
            let all = (numbers(device, &[rows + 5, size_out], dtype, 20) * scale).unwrap();
            let of_rows = |all: &Tensor| all.narrow(0, 2, rows).unwrap();
            let want = (of_rows(&all) + layer.forward(&x).unwrap()).unwrap();
            let [before, after] = [(0, 2), (rows + 2, 3)];
            let others = |all: &Tensor| [before, after].map(|(first, len)| values(&all.narrow(0, first, len).unwrap()));
            let untouched = others(&all);
            layer.add_to(&x, &of_rows(&all)).unwrap();
            assert!(values(&of_rows(&all)) == values(&want), "{rows} x {size_in} x {size_out}");
            assert!(others(&all) == untouched, "{rows} x {size_in} x {size_out}: other rows");
        }
        let x = Rows::from(numbers(device, &[9, size_in], dtype, 19));
        let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device).unwrap();
        let transposed = zeros(&[size_out, 9], dtype).t().unwrap();
        for misfit in [zeros(&[8, size_out], dtype), zeros(&[9, size_out], DType::F32), transposed] {
            assert!(layer.add_to(&x, &misfit).is_err(), "{misfit:?}");
        }
    }
}

/// The rotation spreads an entry of 200 times the others: without it the error would be .14.
fn large_entries(device: &Device) {
    let mut x = noise(20 * 4096, 13);
    x.iter_mut().skip(77).step_by(4096).for_each(|x| *x *= 200.0);
    let x = Tensor::from_vec(x, (20, 4096), device).unwrap().to_dtype(DType::BF16).unwrap();
    let weight = numbers(device, &[256, 4096], DType::BF16, 14);
    let layer = Int8Linear::new(&candle_nn::Linear::new(weight.clone(), None)).unwrap();
    let [x32, weight32] = [&x, &weight].map(|x| x.to_dtype(DType::F32).unwrap());
    let want = values(&x32.matmul(&weight32.t().unwrap()).unwrap());
    let error = relative_l2(&values(&layer.forward(&x.into()).unwrap()), &want);
    assert!(error < 0.03, "{error}");
}

/// What is not finite reaches its own row only.
fn not_finite(device: &Device, dtype: DType) {
    let layer = Int8Linear::new(&candle_nn::Linear::new(numbers(device, &[32, 64], dtype, 10), None)).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for rows in [3, 20] {
            let mut x = noise(rows * 64, 11);
            x[64 + 5] = bad;
            // A row of zeros, and one whose numbers are too small for a factor.
            x[2 * 64..].iter_mut().take(64).for_each(|x| *x *= 0.0);
            let x = Tensor::from_vec(x, (rows, 64), device).unwrap().to_dtype(dtype).unwrap();
            let quantised = Rows::Int8(RotatedInt8::quantise(&x).unwrap());
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
    assert!(dequantised(&RotatedInt8::quantise(&tiny).unwrap()).iter().all(|&x| x == 0.0), "tiny numbers");
}

fn misfits(device: &Device) {
    let bf16 = |dims: &[usize]| numbers(device, dims, DType::BF16, 12);
    let linear = |dims: &[usize]| candle_nn::Linear::new(bf16(dims), None);
    assert!(RotatedInt8::quantise(&bf16(&[2, 40])).is_err(), "a width of 40");
    assert!(RotatedInt8::quantise(&bf16(&[1, 40000])).is_err(), "a width of 40000");
    assert!(RotatedInt8::quantise(&bf16(&[2, 64]).to_dtype(DType::F32).unwrap()).is_err(), "f32");
    assert!(RotatedInt8::quantise(&bf16(&[2, 64]).to_device(&Device::Cpu).unwrap()).is_err(), "on the CPU");
    assert!(Int8Linear::new(&linear(&[40, 64])).is_err(), "40 outputs");
    assert!(Int8Linear::gated(&bf16(&[40, 64]), &bf16(&[40, 64])).is_err(), "40 gates");
    assert!(Int8Linear::gated(&bf16(&[32, 64]), &bf16(&[48, 64])).is_err(), "32 gates for 48 ups");
    let layer = Int8Linear::new(&linear(&[32, 64])).unwrap();
    assert!(layer.forward(&bf16(&[2, 32]).into()).is_err(), "rows of another width");
    let dense = StackedLinear::new(vec![Linear::Dense(linear(&[32, 64]))]).unwrap();
    let rows = Rows::Int8(RotatedInt8::quantise(&bf16(&[2, 64])).unwrap());
    assert!(dense.forward(&rows).is_err(), "quantised rows for another layer");
    assert!(dense.in_precision(LinearPrecision::Int8).unwrap().forward(&rows).is_ok());
}

fn options(device: &Device) -> LoadOptions {
    LoadOptions {
        device: device.clone(),
        dtype: Some(DType::BF16),
        linear: LinearPrecision::Int8,
        ..LoadOptions::default()
    }
}

/// Logits of a prompt and of decoding.
fn needle(device: &Device) {
    let narrow = ModelSource::Embedded.load(&options(device), None).unwrap();
    let as_read = LoadOptions { linear: LinearPrecision::AsRead, ..options(device) };
    let wide = ModelSource::Embedded.load(&as_read, None).unwrap();
    assert_eq!(narrow.decoder.precision(), "bf16 with int8 linear layers");
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
        println!("int8 layers, needle-11m, {what}: logits off by {error:.3}");
        assert!(error > 0.0 && error < 0.03, "{what}: {error}");
    }
}
