//! Sequences of different lengths on a GPU.

use candle_core::{Device, Tensor};

use crate::engine::{self, Call, Checked, FlashAttn};
use crate::error::FlashAttnError;
use crate::kernel::{KernelCall, Sequences, on_device};
use crate::pages::PageTable;
use crate::varlen::{Pages, cumulative};

type Result<T> = std::result::Result<T, FlashAttnError>;

/// A call of `varlen` with tensors on a GPU.
pub(crate) struct OnGpu<'a> {
    pub(crate) qkv: [&'a Tensor; 3],
    pub(crate) seqlens: [&'a Tensor; 2],
    pub(crate) longest: [usize; 2],
    pub(crate) pages: Option<&'a Pages<'a>>,
    pub(crate) op: &'a FlashAttn,
}

impl OnGpu<'_> {
    /// `None` if the host has to read the lengths, to make long sequences sparse.
    pub(crate) fn run(&self, batch: usize, may_skip: bool) -> Result<Option<Tensor>> {
        let Self { qkv: [q, k, v], seqlens: [seqlens_q, seqlens_k], longest, pages, op } = *self;
        let device = q.device();
        // Lengths that the host has are checked. The kernel cuts those on the GPU to the rows that exist.
        let known = |name, lengths: &Tensor, longest, rows| match lengths.device().is_cpu() {
            true => cumulative(name, lengths, longest, rows).map(Some),
            false => Ok(None),
        };
        let rows_k = pages.is_none().then_some(k.dims()[0]);
        let ends = [
            known("seqlens_q", seqlens_q, longest[0], Some(q.dims()[0]))?,
            known("seqlens_k", seqlens_k, longest[1], rows_k)?,
        ];
        let table = pages.map(|pages| pages.on_device(batch, device)).transpose()?;
        // The rows of all sequences, or of all pages, as one.
        let rows = |x: &Tensor| match pages {
            Some(_) => x.flatten(0, 1)?.unsqueeze(0),
            None => x.unsqueeze(0),
        };
        let (q4, k4, v4) = (q.unsqueeze(0)?, rows(k)?, rows(v)?);
        let Checked { slopes, softcap } = engine::checked(&q4, &k4, &v4, op)?;
        if q.elem_count() == 0 || k.elem_count() == 0 {
            return Ok(Some(q.zeros_like()?));
        }
        let window = op.window(longest[1]);
        // One sequence that is all rows is a call with one length. Lengths that the host has not seen are taken to be the
        // longest, and the kernel corrects the output if they are not.
        let is_whole = batch == 1
            && longest[0] == q.dims()[0]
            && rows_k.unwrap_or(longest[1]) == longest[1]
            && table.as_ref().is_none_or(|table| table.holds(longest[1]))
            && ends.iter().zip(longest).all(|(ends, longest)| ends.as_ref().is_none_or(|ends| *ends == [0, longest]));
        if may_skip && !is_whole && engine::has_fast_path(q)? {
            return Ok(None);
        }
        let starts = || -> Result<_> {
            Ok([on_device("seqlens_q", seqlens_q, device)?, on_device("seqlens_k", seqlens_k, device)?])
        };
        let (qkv, softmax_scale) = ([&q4, &k4, &v4], op.softmax_scale);
        let kernel = |starts, pages| {
            let sequences = Some(Sequences { starts, longest, pages });
            KernelCall { qkv, softmax_scale, window, slopes, softcap, sequences }
        };
        if is_whole && (may_skip || pages.is_none()) {
            let [keys, values] = match &table {
                Some(table) => table.side_by_side([k, v], longest[1])?,
                None => [k.clone(), v.clone()],
            };
            let call = Call { op, window, ranges: Vec::new(), may_skip };
            let out = engine::dispatch(&q4, &keys.unsqueeze(0)?, &values.unsqueeze(0)?, &call)?;
            if ends.contains(&None) {
                kernel(starts()?, table).correct(&out)?;
            }
            return Ok(Some(out.squeeze(0)?));
        }
        Ok(Some(kernel(starts()?, table).run()?.squeeze(0)?))
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
