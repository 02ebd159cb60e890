//! Keys and values in 8 bits: the kernels against the same steps in Candle on the CPU, and decoding against decoding on
//! the loaded rows, bit for bit.

use candle_core::{DType, Device, Tensor};
use candle_s2o::Dense;
use s2o_models::fused::{Int8Rows, decode_attn_int8};
use s2o_models::{GenerationOptions, KvStorage, LoadOptions, LoadedModel, ModelSource, PrefillOptions, decode_attn};
use s2o_testkit::{noise, relative_l2};

use crate::Runner;
use crate::exact::{bits, values};

/// Numbers of several sizes: every row of a head has its own.
fn rows(dims: (usize, usize, usize, usize), dtype: DType, device: &Device, seed: u64) -> Tensor {
    let (batch, len, heads, head_dim) = dims;
    let numbers = noise(batch * len * heads * head_dim, seed);
    let sized = numbers.iter().enumerate().map(|(i, x)| x * 2f32.powi((i / head_dim * 7 % 23) as i32 - 11));
    Tensor::from_vec(sized.collect::<Vec<_>>(), dims, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
        .to_device(device)
        .unwrap()
}

pub fn cases(runner: &mut Runner) {
    for dtype in [DType::BF16, DType::F16] {
        for head_dim in [64, 128] {
            runner.case(&format!("int8 rows D{head_dim} {dtype:?}"), |runner| {
                for (batch, len, heads) in [(1, 1, 1), (2, 37, 3), (1, 300, 8), (3, 130, 2)] {
                    same_as_on_the_cpu(&runner.device, (batch, len, heads, head_dim), dtype);
                }
            });
            runner.case(&format!("int8 rows that are not finite D{head_dim} {dtype:?}"), |runner| {
                not_finite(&runner.device, head_dim, dtype);
            });
            for (len, heads) in
                [(1, [2, 1]), (16, [8, 2]), (63, [4, 4]), (256, [14, 2]), (257, [8, 1]), (1000, [40, 2])]
            {
                runner.case(&format!("int8 decode {len} {heads:?} D{head_dim} {dtype:?}"), |runner| {
                    decodes(&runner.device, len, heads, head_dim, dtype);
                });
            }
        }
        runner.case(&format!("int8 decode 40001 {dtype:?}"), |runner| {
            decodes(&runner.device, 40_001, [8, 2], 128, dtype);
        });
    }
    runner.case("int8 cache needle-11m", |runner| needle(&runner.device));
}

/// Codes, scales and rounded rows of every position but the first and the last, which stay zero.
fn same_as_on_the_cpu(device: &Device, dims: (usize, usize, usize, usize), dtype: DType) {
    let range = if dims.1 > 2 { 1..dims.1 - 1 } else { 0..dims.1 };
    let [got, want] = [device, &Device::Cpu].map(|device| {
        let (rows, int8) = (rows(dims, dtype, device, 5), Int8Rows::zeros(dims, device).unwrap());
        int8.store(&rows, range.clone()).unwrap();
        let loaded = Tensor::ones(dims, dtype, device).unwrap();
        int8.load(&loaded, range.clone()).unwrap();
        let codes: Vec<u8> = int8.codes().flatten_all().unwrap().to_vec1().unwrap();
        (codes, bits(int8.scales()), bits(&rows), bits(&loaded))
    });
    assert!(got.0 == want.0, "codes");
    assert!(got.1 == want.1, "scales");
    assert!(got.2 == want.2, "rounded rows");
    assert!(got.3 == want.3, "loaded rows");
}

fn not_finite(device: &Device, head_dim: usize, dtype: DType) {
    let dims = (1, 5, 2, head_dim);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = values(&rows(dims, DType::F32, &Device::Cpu, 6));
        numbers[3 * head_dim + 7] = bad;
        let rows = Tensor::from_vec(numbers, dims, device).unwrap().to_dtype(dtype).unwrap();
        let int8 = Int8Rows::zeros(dims, device).unwrap();
        int8.store(&rows, 0..5).unwrap();
        let loaded = Tensor::zeros(dims, dtype, device).unwrap();
        int8.load(&loaded, 0..5).unwrap();
        for rows in [rows, loaded] {
            for (row, x) in values(&rows).chunks(head_dim).enumerate() {
                assert!(x.iter().all(|x| if row == 3 { x.is_nan() } else { x.is_finite() }), "{bad}, row {row}");
            }
        }
    }
}

/// Three sequences in a cache with room behind them, of which two are decoded.
fn decodes(device: &Device, len: usize, [num_heads, num_kv_heads]: [usize; 2], head_dim: usize, dtype: DType) {
    let dims = (3, len + 70, num_kv_heads, head_dim);
    let stored = [7, 8].map(|seed| {
        let int8 = Int8Rows::zeros(dims, device).unwrap();
        int8.store(&rows(dims, dtype, device, seed), 0..dims.1).unwrap();
        int8.sequences(&(1..3)).unwrap()
    });
    let q = Tensor::from_vec(noise(2 * num_heads * head_dim, 9), (2, 1, num_heads, head_dim), device).unwrap();
    let q = (q * 2.0).unwrap().to_dtype(dtype).unwrap();
    let [k, v] = stored.each_ref().map(|int8| {
        let loaded = Tensor::zeros((2, len, num_kv_heads, head_dim), dtype, device).unwrap();
        int8.load(&loaded, 0..len).unwrap();
        loaded
    });
    let want = decode_attn(&q, &k, &v, 0.1).unwrap();
    let [k, v] = &stored;
    let got = decode_attn_int8(&q, [k, v], len, 0.1).unwrap().expect("a kernel");
    assert!(values(&got).iter().all(|x| x.is_finite()) && values(&got).iter().any(|x| x.abs() > 1e-3));
    assert!(bits(&got) == bits(&want), "other bits than on the loaded rows");
    let none = Tensor::zeros((2, 1, num_heads, 80), dtype, device).unwrap();
    let wide = Int8Rows::zeros((2, len, num_kv_heads, 80), device).unwrap();
    assert!(decode_attn_int8(&none, [&wide, &wide], len, 0.1).unwrap().is_none(), "a head size without a kernel");
    assert!(decode_attn_int8(&q, [k, v], len + 71, 0.1).is_err(), "more keys than the cache has");
}

/// Logits of a prompt in chunks and of decoding, near those of the wide cache; and the passkey.
fn needle(device: &Device) {
    let load = |kv| {
        let options = LoadOptions { device: device.clone(), dtype: Some(DType::BF16), kv, ..LoadOptions::default() };
        ModelSource::Embedded.load(&options, None).unwrap()
    };
    let (narrow, wide) = (load(KvStorage::Int8), load(KvStorage::AsComputed));
    assert_eq!(narrow.decoder.precision(), "bf16, KV cache in 8 bits");
    let prompt = s2o_eval::tasks::passkey::build(&wide.tokenizer, 3000, 0.4, 7).unwrap();
    let run = |model: &LoadedModel, chunk: usize| {
        let mut cache = model.decoder.new_cache(1, prompt.tokens.len() + 24).unwrap();
        let tokens = model.prompt(&prompt.tokens).unwrap();
        let options = PrefillOptions::new().chunk(chunk).num_logits(64);
        let prefilled = model.decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap().logits;
        let token = Tensor::new(&[[prompt.tokens[0]]], device).unwrap();
        let decoded = model.decoder.decode(&token, &mut cache).unwrap();
        cache.reset();
        let (prefill, options) =
            (PrefillOptions::new().chunk(chunk), GenerationOptions { max_new_tokens: 24, ..Default::default() });
        let out = model.generate(&prompt.tokens, &mut cache, &Dense, prefill, &options, &mut |_| {}).unwrap();
        assert!(s2o_models::passkey::answers_exactly(&out.text, &prompt.answer), "chunk {chunk}: {:?}", out.text);
        [values(&prefilled), values(&decoded)]
    };
    let want = run(&wide, 3000);
    for chunk in [3000, 1000] {
        let got = run(&narrow, chunk);
        for (what, got, want) in [("prefill", &got[0], &want[0]), ("decoding", &got[1], &want[1])] {
            let error = relative_l2(got, want);
            println!("int8 cache needle-11m, {what}, chunk {chunk}: logits off by {error:.4}");
            assert!(error > 0.0 && error < 0.05, "{what}, chunk {chunk}: {error}");
        }
    }
}
