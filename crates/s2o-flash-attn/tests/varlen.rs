//! The functions on sequences of different lengths, against the f64 reference of each sequence.

mod reference;

use candle_core::{DType, Device, IndexOp, Result, Tensor};
use reference::{Asked, assert_close, attend};
use s2o_flash_attn::{
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
};
use s2o_testkit::tensor;

const SCALE: f32 = 0.3;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
/// One sequence without queries, one without keys, one with more queries than keys.
const LENGTHS: [(usize, usize); 6] = [(5, 5), (1, 17), (0, 4), (3, 0), (9, 6), (12, 40)];
const MAX_Q: usize = 12;
const MAX_K: usize = 40;
const WINDOWS: [(Option<usize>, Option<usize>); 5] =
    [(None, None), (None, Some(0)), (Some(3), Some(0)), (Some(2), Some(1)), (Some(1000), Some(0))];

struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens_q: Tensor,
    seqlens_k: Tensor,
    slopes: Tensor,
}

fn cumulative(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut sum = 0;
    std::iter::once(0)
        .chain(lengths.map(|length| {
            sum += length as u32;
            sum
        }))
        .collect()
}

fn case(dtype: DType) -> Result<Case> {
    let (ends_q, ends_k) = (cumulative(LENGTHS.iter().map(|l| l.0)), cumulative(LENGTHS.iter().map(|l| l.1)));
    let (total_q, total_k) = (ends_q[LENGTHS.len()] as usize, ends_k[LENGTHS.len()] as usize);
    Ok(Case {
        q: tensor(&[total_q, HEADS, DIM], 1, dtype),
        k: tensor(&[total_k, KV_HEADS, DIM], 2, dtype),
        v: tensor(&[total_k, KV_HEADS, DIM], 3, dtype),
        seqlens_q: Tensor::new(ends_q, &Device::Cpu)?,
        seqlens_k: Tensor::new(ends_k, &Device::Cpu)?,
        slopes: Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?,
    })
}

fn slopes() -> Option<Vec<f64>> {
    Some(vec![0.5, 0.25, 0.125, 0.0625])
}

impl Case {
    /// The concatenated reference outputs of all sequences.
    fn expected(&self, asked: &Asked) -> Result<Vec<f64>> {
        let (mut from_q, mut from_k, mut out) = (0, 0, Vec::new());
        for (q_len, k_len) in LENGTHS {
            let cut = |t: &Tensor, from: usize, len: usize| t.narrow(0, from, len)?.unsqueeze(0);
            let [q, k, v] = [cut(&self.q, from_q, q_len)?, cut(&self.k, from_k, k_len)?, cut(&self.v, from_k, k_len)?];
            if k_len == 0 {
                out.extend(vec![0.0; q.elem_count()])
            } else {
                out.extend(attend(&q, &k, &v, asked)?)
            }
            (from_q, from_k) = (from_q + q_len, from_k + k_len);
        }
        Ok(out)
    }

    fn varlen(&self, causal: bool) -> Result<Tensor> {
        flash_attn_varlen(&self.q, &self.k, &self.v, &self.seqlens_q, &self.seqlens_k, MAX_Q, MAX_K, SCALE, causal)
    }
}

fn asked((left, right): (Option<usize>, Option<usize>)) -> Asked {
    let [left, right] = [left, right].map(|size| size.filter(|&size| size <= MAX_K));
    Asked { scale: SCALE.into(), left, right, ..Asked::default() }
}

#[test]
fn plain_and_causal_in_every_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let case = case(dtype)?;
        for causal in [false, true] {
            let out = case.varlen(causal)?;
            assert_eq!((out.dims(), out.dtype()), (case.q.dims(), dtype));
            assert_close(&out, &case.expected(&asked((None, causal.then_some(0))))?, &format!("{dtype:?} {causal}"));
        }
    }
    Ok(())
}

#[test]
fn windows_slopes_and_caps() -> Result<()> {
    let case = case(DType::F32)?;
    let Case { q, k, v, seqlens_q, seqlens_k, slopes: tensor } = &case;
    for (left, right) in WINDOWS {
        let what = format!("{left:?} {right:?}");
        let plain = asked((left, right));
        let out = flash_attn_varlen_windowed(q, k, v, seqlens_q, seqlens_k, MAX_Q, MAX_K, SCALE, left, right)?;
        assert_close(&out, &case.expected(&plain)?, &what);
        let with_slopes = Asked { slopes: slopes(), ..plain.clone() };
        let out =
            flash_attn_varlen_alibi_windowed(q, k, v, tensor, seqlens_q, seqlens_k, MAX_Q, MAX_K, SCALE, left, right)?;
        assert_close(&out, &case.expected(&with_slopes)?, &what);
        for (given, asked) in [(None, plain), (Some(tensor), with_slopes)] {
            let out = flash_attn_varlen_alibi_windowed_softcap(
                q, k, v, given, seqlens_q, seqlens_k, MAX_Q, MAX_K, SCALE, left, right, 0.5,
            )?;
            assert_close(&out, &case.expected(&Asked { softcap: Some(0.5), ..asked })?, &what);
        }
    }
    for causal in [false, true] {
        let out = flash_attn_varlen_alibi(q, k, v, tensor, seqlens_q, seqlens_k, MAX_Q, MAX_K, SCALE, causal)?;
        let asked = Asked { slopes: slopes(), ..asked((None, causal.then_some(0))) };
        assert_close(&out, &case.expected(&asked)?, &format!("causal {causal}"));
    }
    Ok(())
}

#[test]
fn rows_outside_every_sequence_are_zeros() -> Result<()> {
    let case = case(DType::F32)?;
    let whole = case.varlen(true)?;
    let [seqlens_q, seqlens_k] = [&[5u32, 6], &[5u32, 22]].map(|ends| Tensor::new(ends, &Device::Cpu).unwrap());
    // The rows before the first sequence are no length: they may be more than the longest one.
    let out = flash_attn_varlen(&case.q, &case.k, &case.v, &seqlens_q, &seqlens_k, 1, 17, SCALE, true)?;
    let row = |t: &Tensor, i: usize| t.i(i)?.flatten_all()?.to_vec1::<f32>();
    for i in 0..case.q.dim(0)? {
        let expected = if i == 5 { row(&whole, i)? } else { vec![0.0; HEADS * DIM] };
        assert_eq!(row(&out, i)?, expected, "row {i}");
    }
    Ok(())
}

/// Scatters the keys of each sequence over pages in a mixed order; pages that belong to no sequence hold NaN.
fn paged(all: &Tensor, page_len: usize) -> Result<(Tensor, Tensor)> {
    const PAGES: usize = 32;
    let nan = Tensor::full(f32::NAN, (page_len, KV_HEADS, DIM), &Device::Cpu)?;
    let mut pages = vec![nan; PAGES];
    let (mut table, mut from, mut next) = (Vec::new(), 0, 0);
    for (_, len) in LENGTHS {
        let mut row = vec![0u32; 8];
        for (slot, start) in row.iter_mut().zip((0..len).step_by(page_len)) {
            let page = (next * 7 + 3) % PAGES;
            let held = all.narrow(0, from + start, page_len.min(len - start))?;
            let rest = Tensor::full(f32::NAN, (page_len - held.dim(0)?, KV_HEADS, DIM), &Device::Cpu)?;
            pages[page] = if rest.elem_count() == 0 { held } else { Tensor::cat(&[held, rest], 0)? };
            (*slot, next) = (page as u32, next + 1);
        }
        table.push(row);
        from += len;
    }
    Ok((Tensor::stack(&pages, 0)?, Tensor::new(table, &Device::Cpu)?))
}

#[test]
fn pages_and_prefix_ranges() -> Result<()> {
    let case = case(DType::F32)?;
    let (k, table) = paged(&case.k, 8)?;
    let (v, _) = paged(&case.v, 8)?;
    let ranges = Tensor::new(vec![vec![vec![1u32, 4], vec![30, 36]]; LENGTHS.len()], &Device::Cpu)?;
    for (left, right) in WINDOWS {
        for (given, held) in [(None, Vec::new()), (Some(&ranges), vec![(1, 4), (30, 36)])] {
            for softcap in [None, Some(0.5f32)] {
                let asked = Asked { ranges: held.clone(), softcap: softcap.map(f64::from), ..asked((left, right)) };
                let Case { q, seqlens_q: ends_q, seqlens_k: ends_k, .. } = &case;
                let out = flash_attn_varlen_paged_windowed(
                    q, &k, &v, ends_q, ends_k, &table, given, MAX_Q, MAX_K, SCALE, left, right, 8, softcap,
                )?;
                assert_close(&out, &case.expected(&asked)?, &format!("{left:?} {right:?} {held:?} {softcap:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn bad_inputs_say_what_was_expected_and_got() -> Result<()> {
    let case = case(DType::F32)?;
    let says = |result: Result<Tensor>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "expected {words:?}, got {error:?}");
    };
    let ends = |ends: &[u32]| Tensor::new(ends, &Device::Cpu).unwrap();
    let with = |seqlens_q: &Tensor, seqlens_k: &Tensor, max_q: usize| {
        flash_attn_varlen(&case.q, &case.k, &case.v, seqlens_q, seqlens_k, max_q, MAX_K, SCALE, true)
    };
    let ends_k = &case.seqlens_k;
    let three = ends(&[0, 5, 9]);
    says(with(&ends(&[0, 5, 4]), &three, MAX_Q), "seqlens_q[2]: expected at least 5, the element before it, got 4");
    says(with(&ends(&[0, 31]), &ends(&[0, 9]), 99), "seqlens_q: expected 0 to 30, got 31");
    says(with(&ends(&[0, 9]), ends_k, MAX_Q), "seqlens_k: expected [2] as seqlens_q, got [7]");
    says(with(&case.seqlens_q, ends_k, 11), "a length in seqlens_q: expected 0 to 11, got 12");
    says(with(&three.to_dtype(DType::F32)?, &three, MAX_Q), "seqlens_q: expected dtype U32, I32 or I64, got F32");
    says(with(&ends(&[0]), ends_k, MAX_Q), "seqlens_q: expected [batch + 1] with at least 2 elements, got [1]");
    let four = case.q.unsqueeze(0)?;
    says(
        flash_attn_varlen(&four, &case.k, &case.v, &case.seqlens_q, ends_k, MAX_Q, MAX_K, SCALE, true),
        "q: expected (total_q, num_heads, head_dim), got [1, 30, 4, 16]",
    );

    let (k, table) = paged(&case.k, 8)?;
    let call = |table: &Tensor, ranges: Option<&Tensor>, page_len: usize| {
        let Case { q, seqlens_q: ends_q, .. } = &case;
        flash_attn_varlen_paged_windowed(
            q,
            &k,
            &k,
            ends_q,
            ends_k,
            table,
            ranges,
            MAX_Q,
            MAX_K,
            SCALE,
            None,
            Some(0),
            page_len,
            None,
        )
    };
    let with = |table: &Tensor, page_len: usize| call(table, None, page_len);
    says(with(&table, 16), "k: expected page_block_size = 16 as dimension 1, got [32, 8, 2, 16]");
    says(with(&(table.to_dtype(DType::F32)? + 32.0)?.to_dtype(DType::U32)?, 8), "block_table: expected 0 to 31, got 3");
    says(with(&table.narrow(1, 0, 2)?, 8), "pages of a sequence: expected 0 to 2, got 3");
    says(with(&table.narrow(0, 0, 2)?, 8), "block_table: expected (6, max_blocks), got [2, 8]");
    for (sizes, got) in [([6, 1, 1], "[6, 1, 1]"), ([2, 1, 2], "[2, 1, 2]")] {
        let ranges = Tensor::zeros(&sizes, DType::U32, &Device::Cpu)?;
        let words = format!("mm_prefix_ranges: expected (6, max_ranges, 2), got {got}");
        says(call(&table, Some(&ranges), 8), &words);
    }
    Ok(())
}
