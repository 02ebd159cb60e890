//! The reference: attention by its definition in f64, one query of one head at a time, on tensors of one length.

use candle_core::{DType, Result, Tensor};

/// The arguments of a call besides its tensors. Windows apply as given.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    pub scale: f64,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub slopes: Option<Vec<f64>>,
    pub softcap: Option<f64>,
    pub ranges: Vec<(i64, i64)>,
}

/// The output as the elements of (batch, q_len, num_heads, head_dim).
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, asked: &Asked) -> Result<Vec<f64>> {
    let (batch, q_len, num_heads, head_dim) = q.dims4()?;
    let (_, k_len, num_kv_heads, _) = k.dims4()?;
    let read = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (qs, ks, vs) = (read(q)?, read(k)?, read(v)?);
    let mut out = Vec::with_capacity(qs.len());
    for b in 0..batch {
        for i in 0..q_len {
            for h in 0..num_heads {
                let q_at = ((b * q_len + i) * num_heads + h) * head_dim;
                let kv_at = |j: usize| ((b * k_len + j) * num_kv_heads + h * num_kv_heads / num_heads) * head_dim;
                let position = i as i64 + k_len as i64 - q_len as i64;
                let mut weighted = vec![0.0; head_dim];
                let mut sum = 0.0;
                for j in 0..k_len {
                    let key = j as i64;
                    let in_window = asked.left.is_none_or(|left| key >= position - left as i64)
                        && asked.right.is_none_or(|right| key <= position + right as i64);
                    let in_range =
                        asked.ranges.iter().any(|&(s, e)| s <= position && position < e && s <= key && key < e);
                    if !in_window && !in_range {
                        continue;
                    }
                    let mut score = asked.scale * (0..head_dim).map(|d| qs[q_at + d] * ks[kv_at(j) + d]).sum::<f64>();
                    if let Some(cap) = asked.softcap {
                        score = cap * (score / cap).tanh();
                    }
                    if let Some(slopes) = &asked.slopes {
                        score -= slopes[h] * (position - key).abs() as f64;
                    }
                    sum += score.exp();
                    (0..head_dim).for_each(|d| weighted[d] += score.exp() * vs[kv_at(j) + d]);
                }
                out.extend(weighted.into_iter().map(|x| if sum > 0.0 { x / sum } else { 0.0 }));
            }
        }
    }
    Ok(out)
}

/// Fails if `out` differs from `expected` by more than rounding in its dtype.
#[track_caller]
pub fn assert_close(out: &Tensor, expected: &[f64], what: &str) {
    let tolerance = match out.dtype() {
        DType::F32 => 2e-5,
        DType::F16 => 3e-3,
        _ => 2e-2,
    };
    let out = out.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(out.len(), expected.len(), "{what}");
    for (i, (out, expected)) in out.iter().zip(expected).enumerate() {
        // Not `>`, because NaN must fail.
        assert!((out - expected).abs() <= tolerance, "{what}: element {i}: expected {expected}, got {out}");
    }
}
