//! Sequences of different lengths on a GPU. One launch computes the exact ones; each sparse one is a call of its own.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Tensor, TensorId};

use crate::engine::{self, Call, Checked, FlashAttn};
use crate::error::FlashAttnError;
use crate::kernel::{KernelCall, Rows, Sequences, on_device};
use crate::pages::PageTable;
use crate::varlen::{Pages, cumulative};

type Result<T> = std::result::Result<T, FlashAttnError>;

/// The lengths that the host has read last: the layers of a model pass the same two tensors.
static READ: Mutex<Option<([TensorId; 2], Vec<Rows>)>> = Mutex::new(None);

/// A call of `varlen` with tensors on a GPU.
pub(crate) struct OnGpu<'a> {
    pub(crate) qkv: [&'a Tensor; 3],
    pub(crate) seqlens: [&'a Tensor; 2],
    pub(crate) longest: [usize; 2],
    pub(crate) pages: Option<&'a Pages<'a>>,
    pub(crate) op: &'a FlashAttn,
    pub(crate) batch: usize,
    /// Number of keys from which sequences of the call may be sparse, if any may.
    pub(crate) sparse_from: Option<usize>,
}

impl OnGpu<'_> {
    pub(crate) fn run(&self) -> Result<Tensor> {
        let Self { qkv: [q, k, v], seqlens: [seqlens_q, seqlens_k], longest, pages, op, batch, sparse_from } = *self;
        let device = q.device();
        let known = self.known_rows()?;
        let table = pages.map(|pages| pages.on_device(batch, device)).transpose()?;
        // The rows of all sequences, or of all pages, as one.
        let all_rows = |x: &Tensor| match pages {
            Some(_) => x.flatten(0, 1)?.unsqueeze(0),
            None => x.unsqueeze(0),
        };
        let (q4, k4, v4) = (q.unsqueeze(0)?, all_rows(k)?, all_rows(v)?);
        let Checked { slopes, softcap } = engine::checked(&q4, &k4, &v4, op)?;
        if q.elem_count() == 0 || k.elem_count() == 0 {
            return Ok(q.zeros_like()?);
        }
        let window = op.window(longest[1]);
        let sparse_from = if engine::has_fast_path(q)? { sparse_from } else { None };
        let expected = match known.clone().or_else(|| self.rows_of_equal_lengths(table.as_ref())) {
            None if sparse_from.is_some() => Some(self.read_rows()?),
            rows => rows,
        };
        // A sequence of all rows is a call with one length, which has more kernels. With settings by layer every
        // sequence counts, so the only one of a call goes there too.
        let goes_alone = |rows: &Rows| match sparse_from {
            _ if rows.q.is_empty() => false,
            Some(from) => batch == 1 || rows.q.len() > 1 && rows.k.len() >= from,
            None => pages.is_none() && batch == 1 && [&rows.q, &rows.k].map(|rows| rows.len()) == longest,
        };
        let alone = |rows: Rows| goes_alone(&rows).then_some(rows);
        let alone: Vec<Option<Rows>> = expected.into_iter().flatten().map(alone).collect();
        let kernel = |table| -> Result<KernelCall<'_>> {
            let starts = [on_device("seqlens_q", seqlens_q, device)?, on_device("seqlens_k", seqlens_k, device)?];
            let sequences = Some(Sequences { starts, longest, pages: table });
            let (qkv, softmax_scale) = ([&q4, &k4, &v4], op.softmax_scale);
            Ok(KernelCall { qkv, softmax_scale, window, slopes, softcap, sequences })
        };
        if alone.iter().all(Option::is_none) {
            return Ok(kernel(table)?.run()?.squeeze(0)?);
        }
        let call = Call { op, window, ranges: Vec::new(), may_skip: sparse_from.is_some() };
        let out = self.attend_alone(&alone, table.as_ref(), &call)?;
        if known.is_none() || alone.contains(&None) {
            kernel(table)?.complete(&out, &alone)?;
        }
        Ok(out)
    }

    /// An output with the sequences of `alone`, each by a call of its own; other rows are zeros.
    fn attend_alone(&self, alone: &[Option<Rows>], table: Option<&PageTable>, call: &Call<'_>) -> Result<Tensor> {
        let [q, k, v] = self.qkv;
        let mut out = None;
        for (i, rows) in alone.iter().enumerate() {
            let Some(Rows { q: of_q, k: of_k }) = rows else { continue };
            let [keys, values] = match table {
                Some(table) => table.side_by_side([k, v], i, of_k.len())?,
                None => [k.narrow(0, of_k.start, of_k.len())?, v.narrow(0, of_k.start, of_k.len())?],
            };
            let queries = q.narrow(0, of_q.start, of_q.len())?.unsqueeze(0)?;
            let part = engine::dispatch(&queries, &keys.unsqueeze(0)?, &values.unsqueeze(0)?, call)?.squeeze(0)?;
            if of_q.len() == q.dims()[0] {
                return Ok(part);
            }
            let all: Tensor = out.take().map_or_else(|| q.zeros_like(), Ok)?;
            all.slice_set(&part, 0, of_q.start)?;
            out = Some(all);
        }
        Ok(out.map_or_else(|| q.zeros_like(), Ok)?)
    }

    /// The rows of each sequence if the host has both lengths, checked. The kernel cuts those on the GPU to the rows
    /// that exist.
    fn known_rows(&self) -> Result<Option<Vec<Rows>>> {
        let on_host = self.seqlens.map(|lengths| lengths.device().is_cpu());
        if on_host == [true, true] {
            return self.rows().map(Some);
        }
        on_host.iter().enumerate().filter(|(_, on_host)| **on_host).try_for_each(|(i, _)| self.ends(i).map(drop))?;
        Ok(None)
    }

    /// Lengths on the GPU are the longest ones if these fill the tensors, or if there is one sequence. The kernel
    /// computes the sequences of which this is not true.
    fn rows_of_equal_lengths(&self, table: Option<&PageTable>) -> Option<Vec<Rows>> {
        let Self { batch, longest: [q_len, k_len], .. } = *self;
        let fills_q = self.qkv[0].dims()[0] == batch * q_len;
        let fills_k = match table {
            None => self.qkv[1].dims()[0] == batch * k_len,
            // Causal queries have their own keys, so as many keys as queries are the fewest.
            Some(table) => table.holds(k_len) && (batch == 1 || q_len == k_len),
        };
        let rows = |i| Rows { q: i * q_len..(i + 1) * q_len, k: i * k_len..(i + 1) * k_len };
        (fills_q && fills_k).then(|| (0..batch).map(rows).collect())
    }

    /// The rows of each sequence, which the host reads and so waits for the GPU, unless it has read these tensors last. A tensor
    /// may have been changed in place since, so rows that do not fit the call are read again.
    fn read_rows(&self) -> Result<Vec<Rows>> {
        let ids = self.seqlens.map(Tensor::id);
        let last = || READ.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rows)) = last().as_ref().filter(|(of, rows)| *of == ids && self.holds(rows)) {
            return Ok(rows.clone());
        }
        let rows = self.rows()?;
        *last() = Some((ids, rows.clone()));
        Ok(rows)
    }

    fn holds(&self, rows: &[Rows]) -> bool {
        let [q_len, k_len] = self.longest;
        let is_short = |of: &Rows| of.q.len() <= q_len && of.k.len() <= k_len;
        let is_inside = |of: &Rows| {
            of.q.end <= self.qkv[0].dims()[0] && (self.pages.is_some() || of.k.end <= self.qkv[1].dims()[0])
        };
        rows.len() == self.batch && rows.iter().all(|of| is_short(of) && is_inside(of))
    }

    fn rows(&self) -> Result<Vec<Rows>> {
        let [q, k] = [self.ends(0)?, self.ends(1)?];
        let rows: Vec<Rows> =
            q.windows(2).zip(k.windows(2)).map(|(q, k)| Rows { q: q[0]..q[1], k: k[0]..k[1] }).collect();
        Ok(rows)
    }

    /// The lengths of the queries (0) or keys (1) on the host, checked.
    fn ends(&self, i: usize) -> Result<Vec<usize>> {
        let rows = (i == 0 || self.pages.is_none()).then_some(self.qkv[i].dims()[0]);
        cumulative(["seqlens_q", "seqlens_k"][i], self.seqlens[i], self.longest[i], rows)
    }
}

impl Pages<'_> {
    fn on_device(&self, batch: usize, device: &Device) -> Result<PageTable> {
        self.check(batch)?;
        Ok(PageTable {
            table: on_device("block_table", self.table, device)?,
            page_len: self.page_len,
            ranges: self.prefix_ranges.map(|ranges| on_device("mm_prefix_ranges", ranges, device)).transpose()?,
        })
    }
}
