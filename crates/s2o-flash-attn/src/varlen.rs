//! Sequences of different lengths in one tensor: `q` (total_q, num_heads, head_dim), `k` and `v` (total_k,
//! num_kv_heads, head_dim) or in pages. `seqlens_q` and `seqlens_k` (batch + 1) are cumulative lengths.

use candle_core::{DType, Device, Result, Tensor};
use candle_s2o::{AttnError, S2oError, ShapeError};

use crate::engine::{self, Call, FlashAttn};
use crate::error::FlashAttnError;
use crate::mask::Reach;
use crate::s2o;
#[cfg(feature = "cuda")]
use crate::varlen_gpu::OnGpu;

/// Keys and values as (num_pages, page_len, num_kv_heads, head_dim).
pub(crate) struct Pages<'a> {
    pub(crate) table: &'a Tensor,
    pub(crate) prefix_ranges: Option<&'a Tensor>,
    pub(crate) page_len: usize,
}

/// Attention within each sequence.
fn by_sequence(
    [q, k, v]: [&Tensor; 3],
    [seqlens_q, seqlens_k]: [&Tensor; 2],
    [max_seqlen_q, max_seqlen_k]: [usize; 2],
    pages: Option<Pages<'_>>,
    op: FlashAttn,
) -> Result<Tensor> {
    check(q, k, v, pages.as_ref())?;
    let batch = num_sequences(seqlens_q, seqlens_k)?;
    let window = op.window(max_seqlen_k);
    let is_plain = op.alibi_slopes.is_none() && pages.as_ref().is_none_or(|pages| pages.prefix_ranges.is_none());
    let sparse_from = match is_plain && window.reach(max_seqlen_q, max_seqlen_k) == Reach::Causal {
        true => s2o::sparse_from(q, batch)?.filter(|&from| max_seqlen_k >= from),
        false => None,
    };
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        let (qkv, seqlens, longest) = ([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
        let call = OnGpu { qkv, seqlens, longest, pages: pages.as_ref(), op: &op, batch, sparse_from };
        return Ok(call.run()?);
    }
    let total_q = q.dims()[0];
    let ends_q = cumulative("seqlens_q", seqlens_q, max_seqlen_q, Some(total_q))?;
    let ends_k = cumulative("seqlens_k", seqlens_k, max_seqlen_k, pages.is_none().then_some(k.dims()[0]))?;
    let paged = pages.map(|pages| pages.read(batch)).transpose()?;

    let mut call = Call { op: &op, window, ranges: Vec::new(), may_skip: sparse_from.is_some() };
    // Rows that belong to no sequence are zeros.
    let rows = |from: usize, to: usize| q.narrow(0, from, to - from);
    let mut parts = vec![rows(0, ends_q[0])?.zeros_like()?];
    for i in 0..batch {
        let (from, len) = (ends_k[i], ends_k[i + 1] - ends_k[i]);
        let [keys, values] = match &paged {
            Some((tables, ranges)) => {
                call.ranges.clone_from(&ranges[i]);
                [gathered(k, &tables[i], len)?, gathered(v, &tables[i], len)?]
            }
            None => [k.narrow(0, from, len)?, v.narrow(0, from, len)?],
        };
        let queries = rows(ends_q[i], ends_q[i + 1])?.unsqueeze(0)?;
        let out = engine::dispatch(&queries, &keys.unsqueeze(0)?, &values.unsqueeze(0)?, &call)?;
        parts.push(out.squeeze(0)?);
    }
    parts.push(rows(ends_q[batch], total_q)?.zeros_like()?);
    parts.retain(|part| part.elem_count() > 0);
    if parts.is_empty() { q.zeros_like() } else { Tensor::cat(&parts, 0) }
}

/// Checks the ranks and sizes needed for cutting; each call checks the rest.
fn check(q: &Tensor, k: &Tensor, v: &Tensor, pages: Option<&Pages<'_>>) -> std::result::Result<(), FlashAttnError> {
    let rank = |name, tensor: &Tensor, expected: &str, rank| match tensor.rank() == rank {
        true => Ok(()),
        false => Err(FlashAttnError::dims(name, expected, tensor)),
    };
    rank("q", q, "(total_q, num_heads, head_dim)", 3)?;
    for (name, tensor) in [("k", k), ("v", v)] {
        match pages {
            None => rank(name, tensor, "(total_k, num_kv_heads, head_dim)", 3)?,
            Some(pages) => {
                rank(name, tensor, "(num_pages, page_block_size, num_kv_heads, head_dim)", 4)?;
                if tensor.dims()[1] != pages.page_len {
                    let expected = format!("page_block_size = {} as dimension 1", pages.page_len);
                    return Err(FlashAttnError::dims(name, expected, tensor));
                }
            }
        }
    }
    if k.dims() != v.dims() {
        return Err(FlashAttnError::dims("v", format!("{:?} as k", k.dims()), v));
    }
    let page_len = pages.map_or(1, |pages| pages.page_len);
    for (name, size) in [("num_heads", q.dims()[1]), ("head_dim", q.dims()[2]), ("page_block_size", page_len)] {
        if size == 0 {
            return Err(AttnError::from(S2oError::from(ShapeError::Empty { name })).into());
        }
    }
    Ok(())
}

/// The pages of each sequence, and its ranges.
type Places = (Vec<Vec<i64>>, Vec<Vec<(i64, i64)>>);

impl Pages<'_> {
    /// Copies the table and the ranges to the host.
    fn read(&self, batch: usize) -> std::result::Result<Places, FlashAttnError> {
        self.check(batch)?;
        let tables = integers("block_table", self.table)?.to_vec2()?;
        let Some(ranges) = self.prefix_ranges else { return Ok((tables, vec![Vec::new(); batch])) };
        let pairs = |row: Vec<Vec<i64>>| row.into_iter().map(|pair| (pair[0], pair[1])).collect();
        Ok((tables, integers("mm_prefix_ranges", ranges)?.to_vec3()?.into_iter().map(pairs).collect()))
    }

    pub(crate) fn check(&self, batch: usize) -> std::result::Result<(), FlashAttnError> {
        if !matches!(self.table.dims(), [rows, _] if *rows == batch) {
            return Err(FlashAttnError::dims("block_table", format!("({batch}, max_blocks)"), self.table));
        }
        match self.prefix_ranges {
            Some(ranges) if !matches!(ranges.dims(), [rows, _, 2] if *rows == batch) => {
                Err(FlashAttnError::dims("mm_prefix_ranges", format!("({batch}, max_ranges, 2)"), ranges))
            }
            _ => Ok(()),
        }
    }
}

/// The first `len` tokens of the pages of one sequence, in the order of its table.
fn gathered(pages: &Tensor, table: &[i64], len: usize) -> std::result::Result<Tensor, FlashAttnError> {
    let (num_pages, page_len, num_kv_heads, head_dim) = pages.dims4()?;
    let needed = len.div_ceil(page_len);
    within("pages of a sequence", needed as i64, table.len())?;
    let mut indices = Vec::with_capacity(needed);
    for &page in &table[..needed] {
        within("block_table", page, num_pages.saturating_sub(1))?;
        indices.push(page as u32);
    }
    if indices.is_empty() {
        return Ok(Tensor::zeros((0, num_kv_heads, head_dim), pages.dtype(), pages.device())?);
    }
    let indices = Tensor::new(indices, pages.device())?;
    let rows = pages.contiguous()?.index_select(&indices, 0)?;
    Ok(rows.reshape((needed * page_len, num_kv_heads, head_dim))?.narrow(0, 0, len)?)
}

/// Number of sequences, from tensors of cumulative lengths.
fn num_sequences(seqlens_q: &Tensor, seqlens_k: &Tensor) -> std::result::Result<usize, FlashAttnError> {
    if seqlens_q.rank() != 1 || seqlens_q.elem_count() < 2 {
        return Err(FlashAttnError::dims("seqlens_q", "[batch + 1] with at least 2 elements", seqlens_q));
    }
    if seqlens_k.dims() != seqlens_q.dims() {
        let expected = format!("{:?} as seqlens_q", seqlens_q.dims());
        return Err(FlashAttnError::dims("seqlens_k", expected, seqlens_k));
    }
    Ok(seqlens_q.elem_count() - 1)
}

/// Checked cumulative lengths on the host: they do not descend, no sequence is longer than `max_len`, and together they
/// have at most `rows` rows.
pub(crate) fn cumulative(
    name: &'static str,
    lengths: &Tensor,
    max_len: usize,
    rows: Option<usize>,
) -> std::result::Result<Vec<usize>, FlashAttnError> {
    let lengths: Vec<i64> = integers(name, lengths)?.to_vec1()?;
    let mut previous = 0;
    for (index, &got) in lengths.iter().enumerate() {
        if got < previous {
            return Err(FlashAttnError::Descending { name, index, previous, got });
        }
        if index > 0 {
            let longest = if name == "seqlens_q" { "a length in seqlens_q" } else { "a length in seqlens_k" };
            within(longest, got - previous, max_len)?;
        }
        previous = got;
    }
    within(name, previous, rows.unwrap_or(usize::MAX))?;
    Ok(lengths.into_iter().map(|length| length as usize).collect())
}

fn within(name: &'static str, got: i64, max: usize) -> std::result::Result<(), FlashAttnError> {
    match usize::try_from(got) {
        Ok(size) if size <= max => Ok(()),
        _ => Err(FlashAttnError::OutOfRange { name, max, got }),
    }
}

fn integers(name: &'static str, tensor: &Tensor) -> std::result::Result<Tensor, FlashAttnError> {
    match tensor.dtype() {
        DType::U32 | DType::I32 | DType::I64 => Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::I64)?),
        got => Err(FlashAttnError::DType { name, expected: "U32, I32 or I64", got }),
    }
}

/// Exact attention within each sequence, causal if `causal`: `q` (total_q, num_heads, head_dim), `k` and `v` (total_k,
/// num_kv_heads, head_dim), cumulative lengths `seqlens_q` and `seqlens_k` (batch + 1). Returns the shape and dtype of
/// `q`, with zeros in rows outside every sequence. Such rows are unspecified on a GPU if there is one sequence and
/// `max_seqlen_q` and `max_seqlen_k` are all rows.
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, None, causal.then_some(0), None, None);
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], None, op)
}

/// [`flash_attn_varlen`] with the windows of [`flash_attn_windowed`](crate::flash_attn_windowed).
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, window_size_left, window_size_right, None, None);
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], None, op)
}

/// [`flash_attn_varlen_windowed`] with keys and values in pages of `page_block_size` tokens. `block_table` (batch,
/// max_blocks) lists the pages of each sequence. Positions in the same range of `mm_prefix_ranges` (batch, max_ranges,
/// 2) see each other regardless of the window.
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, window_size_left, window_size_right, None, softcap);
    let pages = Pages { table: block_table, prefix_ranges: mm_prefix_ranges, page_len: page_block_size };
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], Some(pages), op)
}

/// [`flash_attn_varlen`] with the slopes of [`flash_attn_alibi`](crate::flash_attn_alibi).
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, None, causal.then_some(0), Some(alibi_slopes), None);
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], None, op)
}

/// [`flash_attn_varlen_windowed`] with the slopes of [`flash_attn_alibi`](crate::flash_attn_alibi).
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, window_size_left, window_size_right, Some(alibi_slopes), None);
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], None, op)
}

/// [`flash_attn_varlen_alibi_windowed`] with the softcap of
/// [`flash_attn_alibi_windowed_softcap`](crate::flash_attn_alibi_windowed_softcap).
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let op = FlashAttn::new(softmax_scale, window_size_left, window_size_right, alibi_slopes, Some(softcap));
    by_sequence([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], None, op)
}
