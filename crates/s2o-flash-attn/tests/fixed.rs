//! The functions on tensors of one length, against the f64 reference.

mod reference;

use candle_core::{DType, Device, Result, Tensor};
use reference::{Asked, assert_close, attend};
use s2o_flash_attn::{
    FlashAttn, flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_windowed,
};
use s2o_testkit::tensor;

const SCALE: f32 = 0.3;
/// batch, q_len, k_len, num_heads, num_kv_heads, head_dim.
const SHAPES: [[usize; 6]; 7] = [
    [1, 9, 9, 2, 2, 16],
    [2, 7, 20, 4, 2, 8],
    [1, 1, 33, 4, 1, 64],
    [1, 40, 140, 6, 3, 24],
    // More queries than keys, as in cross-attention.
    [2, 23, 5, 4, 2, 16],
    // Head dims that the fast engine does not support.
    [1, 6, 8, 2, 1, 12],
    [1, 5, 6, 2, 1, 320],
];
const WINDOWS: [(Option<usize>, Option<usize>); 8] = [
    (None, None),
    (None, Some(0)),
    (Some(0), Some(0)),
    (Some(3), Some(0)),
    (Some(2), Some(1)),
    (None, Some(2)),
    (Some(1000), Some(0)),
    (Some(1000), Some(1000)),
];

fn inputs([b, q_len, k_len, h, h_kv, d]: [usize; 6], dtype: DType) -> Result<[Tensor; 3]> {
    Ok([
        tensor(&[b, q_len, h, d], 1, dtype),
        tensor(&[b, k_len, h_kv, d], 2, dtype),
        tensor(&[b, k_len, h_kv, d], 3, dtype),
    ])
}

fn slopes(num_heads: usize) -> (Tensor, Vec<f64>) {
    let slopes: Vec<f32> = (0..num_heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
    let exact = slopes.iter().map(|&slope| slope.into()).collect();
    (Tensor::new(slopes, &Device::Cpu).unwrap(), exact)
}

fn asked() -> Asked {
    Asked { scale: SCALE.into(), ..Asked::default() }
}

/// FlashAttention ignores a window larger than the keys.
fn windowed((left, right): (Option<usize>, Option<usize>), k_len: usize) -> Asked {
    let [left, right] = [left, right].map(|size| size.filter(|&size| size <= k_len));
    Asked { left, right, ..asked() }
}

#[test]
fn plain_and_causal_in_every_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for shape in SHAPES {
            let [q, k, v] = inputs(shape, dtype)?;
            let (tensor, slopes) = slopes(shape[3]);
            for causal in [false, true] {
                let what = format!("{shape:?} {dtype:?} causal {causal}");
                let plain = Asked { right: causal.then_some(0), ..asked() };
                let out = flash_attn(&q, &k, &v, SCALE, causal)?;
                assert_eq!((out.dims(), out.dtype()), (q.dims(), dtype));
                assert_close(&out, &attend(&q, &k, &v, &plain)?, &what);
                let out = flash_attn_alibi(&q, &k, &v, &tensor, SCALE, causal)?;
                assert_close(&out, &attend(&q, &k, &v, &Asked { slopes: Some(slopes.clone()), ..plain })?, &what);
            }
        }
    }
    Ok(())
}

#[test]
fn windows_slopes_and_caps() -> Result<()> {
    for shape in SHAPES {
        let [q, k, v] = inputs(shape, DType::F32)?;
        let (tensor, slopes) = slopes(shape[3]);
        for (left, right) in WINDOWS {
            let what = format!("{shape:?} {left:?} {right:?}");
            let plain = windowed((left, right), shape[2]);
            let with_slopes = Asked { slopes: Some(slopes.clone()), ..plain.clone() };
            let out = flash_attn_windowed(&q, &k, &v, SCALE, left, right)?;
            assert_close(&out, &attend(&q, &k, &v, &plain)?, &what);
            let out = flash_attn_alibi_windowed(&q, &k, &v, &tensor, SCALE, left, right)?;
            assert_close(&out, &attend(&q, &k, &v, &with_slopes)?, &what);
            for (given, asked) in [(None, plain), (Some(&tensor), with_slopes)] {
                for cap in [0.7f32, 30.0, 0.0] {
                    let asked = Asked { softcap: (cap > 0.0).then_some(cap.into()), ..asked.clone() };
                    let out = flash_attn_alibi_windowed_softcap(&q, &k, &v, given, SCALE, left, right, cap)?;
                    assert_close(&out, &attend(&q, &k, &v, &asked)?, &format!("{what} {given:?} {cap}"));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn scores_whose_exponential_is_infinite_in_f32() -> Result<()> {
    let [q, k, v] = inputs([1, 9, 9, 2, 2, 16], DType::F32)?;
    // Integers, so that scores are exact; the greatest are above 88.
    let [q, k] = [q, k].map(|t| (t * 4.0).and_then(|t| t.round()).unwrap());
    let out = flash_attn_windowed(&q, &k, &v, 1.0, Some(3), Some(0))?;
    let asked = Asked { scale: 1.0, left: Some(3), right: Some(0), ..Asked::default() };
    assert_close(&out, &attend(&q, &k, &v, &asked)?, "windowed");
    Ok(())
}

#[test]
fn strided_inputs_and_the_op_are_the_function() -> Result<()> {
    let [q, k, v] = inputs([2, 7, 20, 4, 2, 8], DType::F32)?;
    let strided = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.transpose(1, 2);
    let (strided_q, strided_k, strided_v) = (strided(&q)?, strided(&k)?, strided(&v)?);
    for (left, right) in WINDOWS {
        let expected = flash_attn_windowed(&q, &k, &v, SCALE, left, right)?;
        let expected = expected.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        let out = flash_attn_windowed(&strided_q, &strided_k, &strided_v, SCALE, left, right)?;
        assert_close(&out, &expected, &format!("{left:?} {right:?}"));
        let op = FlashAttn {
            softmax_scale: SCALE,
            alibi_slopes: None,
            window_size_left: left,
            window_size_right: right,
            softcap: None,
        };
        let out = strided_q.apply_op3(&k, &v, op)?;
        assert_eq!(out.dims(), q.dims());
        assert_close(&out, &expected, &format!("the op, {left:?} {right:?}"));
    }
    Ok(())
}

#[test]
fn no_keys_give_zeros() -> Result<()> {
    let [q, k, v] = inputs([1, 4, 0, 2, 1, 8], DType::F32)?;
    assert_close(&flash_attn(&q, &k, &v, SCALE, true)?, &[0.0; 64], "no keys");
    Ok(())
}

#[test]
fn bad_inputs_say_what_was_expected_and_got() -> Result<()> {
    let [q, k, v] = inputs([1, 4, 6, 4, 2, 8], DType::F32)?;
    let says = |result: Result<Tensor>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "expected {words:?}, got {error:?}");
    };
    says(flash_attn(&q.squeeze(0)?, &k, &v, SCALE, true), "q: expected 4 dimensions (batch, length, heads, head_dim)");
    says(flash_attn(&q.to_dtype(DType::F64)?, &k, &v, SCALE, true), "q: expected dtype F32, F16 or BF16, got F64");
    says(flash_attn(&q, &k.to_dtype(DType::BF16)?, &v, SCALE, true), "k: expected dtype F32 as q, got BF16");
    says(flash_attn(&q, &k, &v.narrow(1, 0, 5)?, SCALE, true), "v: expected sizes [1, 6, 2, 8], got [1, 5, 2, 8]");
    says(
        flash_attn(&q.narrow(2, 0, 3)?, &k, &v, SCALE, true),
        "num_heads: expected a multiple of num_kv_heads = 2, got 3",
    );
    let (four, _) = slopes(4);
    let alibi = |slopes: &Tensor| flash_attn_alibi(&q, &k, &v, slopes, SCALE, true);
    says(alibi(&four.to_dtype(DType::F16)?), "alibi_slopes: expected dtype F32, got F16");
    says(alibi(&slopes(3).0), "alibi_slopes: expected [4], got [3]");
    let windowed = flash_attn_windowed(&q, &k, &v, f32::NAN, Some(2), Some(0));
    says(windowed, "softmax_scale: expected a finite number, got NaN");
    for (cap, got) in [(f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
        let capped = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, SCALE, None, None, cap);
        says(capped, &format!("softcap: expected a finite number, got {got}; 0 is no cap"));
    }
    Ok(())
}
