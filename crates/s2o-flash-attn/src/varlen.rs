//! Sequences of different lengths in one tensor: `q` (total_q, num_heads, head_dim), `k` and `v` (total_k,
//! num_kv_heads, head_dim) or in pages. `seqlens_q` and `seqlens_k` (batch + 1) are cumulative lengths.

use candle_core::{DType, Device, Result, Tensor};
use candle_s2o::{AttnError, S2oError, ShapeError};

use crate::engine::{self, Call};
use crate::error::FlashAttnError;
use crate::mask::Window;

/// The arguments of a call. Attention is full and plain unless a field after `pages` changes it.
#[derive(Debug)]
struct VarLen<'a> {
    softmax_scale: f32,
    seqlens_q: &'a Tensor,
    seqlens_k: &'a Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    pages: Option<Pages<'a>>,
    alibi_slopes: Option<&'a Tensor>,
    /// Window sizes to the left and to the right.
    window: [Option<usize>; 2],
    softcap: Option<f32>,
}

/// Keys and values as (num_pages, page_len, num_kv_heads, head_dim).
#[derive(Debug)]
struct Pages<'a> {
    table: &'a Tensor,
    prefix_ranges: Option<&'a Tensor>,
    page_len: usize,
}

impl<'a> VarLen<'a> {
    fn new(
        [seqlens_q, seqlens_k]: [&'a Tensor; 2],
        [max_seqlen_q, max_seqlen_k]: [usize; 2],
        softmax_scale: f32,
    ) -> Self {
        Self {
            softmax_scale,
            seqlens_q,
            seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            pages: None,
            alibi_slopes: None,
            window: [None, None],
            softcap: None,
        }
    }

    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.by_sequence(q, k, v)?)
    }

    /// Computes each sequence separately and joins the outputs.
    fn by_sequence(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> std::result::Result<Tensor, FlashAttnError> {
        let total_q = self.check(q, k, v)?;
        let ends_q = cumulative("seqlens_q", self.seqlens_q, self.max_seqlen_q)?;
        let ends_k = cumulative("seqlens_k", self.seqlens_k, self.max_seqlen_k)?;
        if ends_q.len() != ends_k.len() {
            let expected = format!("[{}] as seqlens_q", ends_q.len());
            return Err(FlashAttnError::Dims { name: "seqlens_k", expected, got: vec![ends_k.len()] });
        }
        let last = |ends: &[usize]| ends[ends.len() - 1];
        within("seqlens_q", last(&ends_q) as i64, total_q)?;
        let batch = ends_q.len() - 1;
        let paged = self.pages.as_ref().map(|pages| pages.read(batch)).transpose()?;
        if paged.is_none() {
            within("seqlens_k", last(&ends_k) as i64, k.dims()[0])?;
        }

        let mut call = Call {
            softmax_scale: self.softmax_scale,
            window: Window::new(self.window[0], self.window[1], self.max_seqlen_k),
            alibi_slopes: self.alibi_slopes,
            softcap: self.softcap,
            ranges: Vec::new(),
            may_skip: false,
        };
        // Rows that belong to no sequence are zeros.
        let rows = |from: usize, to: usize| q.narrow(0, from, to - from);
        let mut parts = vec![rows(0, ends_q[0])?.zeros_like()?];
        for i in 0..batch {
            let lengths = [(k, ends_k[i], ends_k[i + 1]), (v, ends_k[i], ends_k[i + 1])];
            let [keys, values] = match &paged {
                Some(paged) => {
                    call.ranges.clone_from(&paged.ranges[i]);
                    lengths.map(|(pages, from, to)| gathered(pages, &paged.tables[i], to - from))
                }
                None => lengths.map(|(all, from, to)| Ok(all.narrow(0, from, to - from)?)),
            };
            let queries = rows(ends_q[i], ends_q[i + 1])?.unsqueeze(0)?;
            let out = engine::dispatch(&queries, &keys?.unsqueeze(0)?, &values?.unsqueeze(0)?, &call)?;
            parts.push(out.squeeze(0)?);
        }
        parts.push(rows(last(&ends_q), total_q)?.zeros_like()?);
        parts.retain(|part| part.elem_count() > 0);
        if parts.is_empty() { Ok(q.zeros_like()?) } else { Ok(Tensor::cat(&parts, 0)?) }
    }

    /// Checks the ranks and sizes needed for cutting; each call checks the rest. Returns the number of queries.
    fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> std::result::Result<usize, FlashAttnError> {
        let rank = |name, tensor: &Tensor, expected: &str, rank| match tensor.rank() == rank {
            true => Ok(()),
            false => Err(FlashAttnError::Dims { name, expected: expected.to_owned(), got: tensor.dims().to_vec() }),
        };
        rank("q", q, "(total_q, num_heads, head_dim)", 3)?;
        for (name, tensor) in [("k", k), ("v", v)] {
            match &self.pages {
                None => rank(name, tensor, "(total_k, num_kv_heads, head_dim)", 3)?,
                Some(pages) => {
                    rank(name, tensor, "(num_pages, page_block_size, num_kv_heads, head_dim)", 4)?;
                    if tensor.dims()[1] != pages.page_len {
                        let expected = format!("page_block_size = {} as dimension 1", pages.page_len);
                        return Err(FlashAttnError::Dims { name, expected, got: tensor.dims().to_vec() });
                    }
                }
            }
        }
        if k.dims() != v.dims() {
            let expected = format!("{:?} as k", k.dims());
            return Err(FlashAttnError::Dims { name: "v", expected, got: v.dims().to_vec() });
        }
        for (name, size) in [("num_heads", q.dims()[1]), ("head_dim", q.dims()[2])] {
            if size == 0 {
                return Err(AttnError::from(S2oError::from(ShapeError::Empty { name })).into());
            }
        }
        Ok(q.dims()[0])
    }
}

/// The contents of [`Pages`] on the host, for each sequence.
struct ReadPages {
    tables: Vec<Vec<i64>>,
    ranges: Vec<Vec<(i64, i64)>>,
}

impl Pages<'_> {
    fn read(&self, batch: usize) -> std::result::Result<ReadPages, FlashAttnError> {
        if self.page_len == 0 {
            return Err(AttnError::from(S2oError::from(ShapeError::Empty { name: "page_block_size" })).into());
        }
        let refuse =
            |name, tensor: &Tensor, expected| FlashAttnError::Dims { name, expected, got: tensor.dims().to_vec() };
        let tables = match self.table.dims() {
            [rows, _] if *rows == batch => integers("block_table", self.table)?.to_vec2()?,
            _ => return Err(refuse("block_table", self.table, format!("({batch}, max_blocks)"))),
        };
        let ranges = match self.prefix_ranges {
            None => vec![Vec::new(); batch],
            Some(ranges) => match ranges.dims() {
                [rows, _, 2] if *rows == batch => {
                    let all: Vec<Vec<Vec<i64>>> = integers("mm_prefix_ranges", ranges)?.to_vec3()?;
                    let pairs = |row: Vec<Vec<i64>>| row.into_iter().map(|pair| (pair[0], pair[1])).collect();
                    all.into_iter().map(pairs).collect()
                }
                _ => return Err(refuse("mm_prefix_ranges", ranges, format!("({batch}, max_ranges, 2)"))),
            },
        };
        Ok(ReadPages { tables, ranges })
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

/// Checked cumulative lengths on the host: they do not descend, and no sequence is longer than `max_len`.
fn cumulative(name: &'static str, lengths: &Tensor, max_len: usize) -> std::result::Result<Vec<usize>, FlashAttnError> {
    if lengths.rank() != 1 || lengths.elem_count() < 2 {
        let expected = "[batch + 1] with at least 2 elements".to_owned();
        return Err(FlashAttnError::Dims { name, expected, got: lengths.dims().to_vec() });
    }
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
/// `q`, with zeros in rows outside every sequence.
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        window: [None, causal.then_some(0)],
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}

/// [`flash_attn_varlen`] with the windows of [`flash_attn_windowed`](crate::flash_attn_windowed).
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        window: [window_size_left, window_size_right],
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}

/// [`flash_attn_varlen_windowed`] with keys and values in pages of `page_block_size` tokens. `block_table` (batch,
/// max_blocks) lists the pages of each sequence. Positions in the same range of `mm_prefix_ranges` (batch, max_ranges,
/// 2) see each other regardless of the window.
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        pages: Some(Pages { table: block_table, prefix_ranges: mm_prefix_ranges, page_len: page_block_size }),
        window: [window_size_left, window_size_right],
        softcap,
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}

/// [`flash_attn_varlen`] with the slopes of [`flash_attn_alibi`](crate::flash_attn_alibi).
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        alibi_slopes: Some(alibi_slopes),
        window: [None, causal.then_some(0)],
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}

/// [`flash_attn_varlen_windowed`] with the slopes of [`flash_attn_alibi`](crate::flash_attn_alibi).
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        alibi_slopes: Some(alibi_slopes),
        window: [window_size_left, window_size_right],
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}

/// [`flash_attn_varlen_alibi_windowed`] with the softcap of
/// [`flash_attn_alibi_windowed_softcap`](crate::flash_attn_alibi_windowed_softcap).
///
/// # Errors
/// If the tensors do not fit, or the GPU kernels do not support the call, see [`FlashAttnError`].
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
    VarLen {
        alibi_slopes,
        window: [window_size_left, window_size_right],
        softcap: Some(softcap),
        ..VarLen::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale)
    }
    .run(q, k, v)
}
