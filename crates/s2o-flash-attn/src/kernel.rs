//! Launches the kernel for exact attention with windows, ALiBi, softcap, sequences and pages on a GPU.

use std::ffi::c_void;
use std::ops::{Deref, Range};
use std::ptr;

use candle_core::{DType, Device, Layout, Storage, Tensor};
use cudarc::driver::{CudaStream, DevicePtrMut, SyncOnDrop, ValidAsZeroBits};
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, Regions, View, cuda_storage, to_i32, unaligned_address};
use s2o_kernels::params::{FlashParams, NO_LIMIT};
use s2o_kernels::{Function, HeadDim, Kernel, LEAST_BOX_ROWS};

use crate::error::FlashAttnError;
use crate::mask::{Reach, Window};
use crate::pages::PageTable;

/// Bytes of keys and values that should stay in L2 while their queries read them.
const L2_BYTES: usize = 32 << 20;
/// Bounds on the number of items of the kernel, which skips those that it does not have: its smallest tiles have this
/// number of rows, and its largest parts of a row this number of columns.
const FEWEST_ROWS: usize = 64;
const MOST_COLUMNS: usize = 256;
/// Elements that the kernel reads at once.
pub(crate) const VECTOR: usize = 8;

/// A call of the kernel: `q` (batch, q_len, num_heads, head_dim), `k` and `v` (batch, k_len, num_kv_heads, head_dim); with
/// `sequences` a batch of 1 that holds the rows of all of them.
#[derive(Debug)]
pub(crate) struct KernelCall<'a> {
    pub(crate) qkv: [&'a Tensor; 3],
    pub(crate) softmax_scale: f32,
    pub(crate) window: Window,
    /// (num_heads), f32.
    pub(crate) slopes: Option<&'a Tensor>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sequences: Option<Sequences>,
}

/// Sequences in one tensor. The integers are i32 on the device of the tensors.
#[derive(Debug)]
pub(crate) struct Sequences {
    /// (batch + 1): the beginnings of the sequences in q and in k, and their ends.
    pub(crate) starts: [Tensor; 2],
    /// The lengths of the longest sequence in q and in k.
    pub(crate) longest: [usize; 2],
    pub(crate) pages: Option<PageTable>,
}

/// The rows of a sequence in q and in k. With pages those in k are counted over the lengths of all sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) q: Range<usize>,
    pub(crate) k: Range<usize>,
}

impl Rows {
    /// As the kernel compares them. Rows that exist have numbers of 31 bits, which is checked with the tensors.
    fn on_device(&self) -> [i32; 4] {
        [self.q.start, self.q.end, self.k.start, self.k.end].map(|row| i32::try_from(row).unwrap_or(-1))
    }
}

impl KernelCall<'_> {
    /// Enqueues the kernel. The tensors are checked: their shapes fit each other.
    pub(crate) fn run(&self) -> Result<Tensor, FlashAttnError> {
        self.compute(None)
    }

    /// Writes to `out` (as q) the sequences that it does not have. It has those of `done`, one entry for each sequence,
    /// if their lengths on the GPU are those of the entry.
    pub(crate) fn complete(&self, out: &Tensor, done: &[Option<Rows>]) -> Result<(), FlashAttnError> {
        self.compute(Some((out, done))).map(drop)
    }

    fn compute(&self, present: Option<(&Tensor, &[Option<Rows>])>) -> Result<Tensor, FlashAttnError> {
        let [q, ..] = self.qkv;
        let head_dim = q.dims()[3];
        if !head_dim.is_multiple_of(VECTOR) || Kernel::Flash.holding(head_dim).is_none() {
            return Err(FlashAttnError::HeadDim { got: head_dim });
        }
        if self.softmax_scale <= 0.0 {
            return Err(cuda(CudaError::SoftmaxScale { got: self.softmax_scale }));
        }
        match q.dtype() {
            DType::BF16 => self.typed::<bf16>(present),
            DType::F16 => self.typed::<f16>(present),
            got => Err(cuda(CudaError::DType { name: "q", got })),
        }
    }

    /// The kernels for tensor cores of sm_90a have no windows, and no pages that cut their boxes of rows. The portable engine
    /// has a similar one for head_dim 64 and 128, which reads no sequences. Other calls use `flash`.
    fn kernel(&self, launcher: &Launcher) -> (Kernel, HeadDim) {
        let [q_len, k_len] = match &self.sequences {
            Some(sequences) => sequences.longest,
            None => [self.qkv[0], self.qkv[1]].map(|tensor| tensor.dims()[1]),
        };
        let sees_all = match self.window.reach(q_len, k_len) {
            Reach::Full => true,
            // Queries before the first key: the tiles of one sequence begin at its first key.
            Reach::Causal => q_len <= k_len || self.sequences.is_some(),
            Reach::Local => false,
        };
        let pages = self.sequences.as_ref().and_then(|sequences| sequences.pages.as_ref());
        let modified = match pages {
            None => Some(Kernel::DenseModified),
            // Few queries leave the larger tiles empty.
            Some(pages) => {
                let fits = pages.ranges.is_none() && pages.box_rows() >= LEAST_BOX_ROWS && q_len > FEWEST_ROWS;
                fits.then_some(Kernel::DensePaged)
            }
        };
        let head_dim = self.qkv[0].dims()[3];
        let size = |kernel: Kernel| kernel.holding(head_dim).map(|size| (kernel, size));
        let has_portable = self.sequences.is_none() && HeadDim::NARROW.iter().any(|size| size.get() == head_dim);
        let modified = modified.filter(|_| sees_all && (launcher.is_sm90a() || has_portable)).and_then(size);
        modified.or_else(|| size(Kernel::Flash)).expect("`compute` has checked the head size")
    }

    fn typed<T: Element + ValidAsZeroBits>(
        &self,
        present: Option<(&Tensor, &[Option<Rows>])>,
    ) -> Result<Tensor, FlashAttnError> {
        let [q, ..] = self.qkv;
        let launcher = Launcher::of(q).map_err(cuda)?;
        if let Some((out, done)) = present {
            let (storage, layout) = out.storage_and_layout();
            let (address, _guard) = unaligned_address::<T>(&storage, layout, launcher.stream()).map_err(cuda)?;
            let view = View::new::<T>(address, &Layout::contiguous(q.shape())).map_err(cuda)?;
            self.launch::<T>(&launcher, view, Some(done)).map_err(cuda)?;
            return Ok(out.clone());
        }
        // The kernel writes the rows of every sequence; rows of none are zeros.
        let mut out = match self.sequences {
            Some(_) => launcher.zeros::<T>(q.elem_count()),
            None => launcher.uninit::<T>(q.shape()),
        }
        .map_err(cuda)?;
        {
            let (address, _out) = out.device_ptr_mut(launcher.stream());
            let out = View::new::<T>(address, &Layout::contiguous(q.shape())).map_err(cuda)?;
            self.launch::<T>(&launcher, out, None).map_err(cuda)?;
        }
        Ok(launcher.tensor(out, q.shape().clone()))
    }

    fn launch<T: Element>(
        &self,
        launcher: &Launcher,
        out: View,
        done: Option<&[Option<Rows>]>,
    ) -> Result<(), CudaError> {
        let stream = launcher.stream();
        let held = self.qkv.map(Tensor::storage_and_layout);
        let [q, k, v] = held.each_ref().map(|(storage, layout)| Operand::new(cuda_storage(storage)?, layout));
        let (q, k, v) = (q?, k?, v?);
        let ((q, _q), (mut k, _k), (mut v, _v)) = (q.view::<T>(stream)?, k.view::<T>(stream)?, v.view::<T>(stream)?);
        if let Some(pages) = self.sequences.as_ref().and_then(|sequences| sequences.pages.as_ref()) {
            (k.box_rows, v.box_rows) = (pages.box_rows(), pages.box_rows());
        }
        let slopes = self.slopes.map(Tensor::storage_and_layout);
        let slopes = slopes.as_ref().map(|held| unaligned_address::<f32>(&held.0, held.1, stream)).transpose()?;

        let [batch, q_rows, num_heads, head_dim] = q.dims;
        let [_, k_rows, num_kv_heads, _] = k.dims;
        let kv_bytes = 2 * k_rows.max(1) * head_dim * size_of::<T>();
        let heads_per_section = (L2_BYTES / kv_bytes).max(1) * (num_heads / num_kv_heads);
        let [left, right] =
            self.window.limits().map(|limit| limit.map_or(NO_LIMIT, |limit| limit.min(NO_LIMIT as usize) as i32));
        let mut regions = Regions::default();
        let next_item = regions.add::<i32>(1);
        let done = done.map(|done| (regions.add::<[i32; 4]>(done.len()), done));
        let scratch = launcher.allocate(&regions)?;
        scratch.zero(next_item)?;
        if let Some((region, done)) = done {
            let entry = |rows: &Option<Rows>| rows.as_ref().map_or([-1; 4], Rows::on_device);
            scratch.upload(region, &done.iter().map(entry).collect::<Vec<_>>())?;
        }
        let whole = FlashParams {
            q: q.address as *const c_void,
            k: k.address as *const c_void,
            v: v.address as *const c_void,
            out: out.address as *mut c_void,
            next_item: scratch.at(next_item),
            q_starts: ptr::null(),
            k_starts: ptr::null(),
            pages: ptr::null(),
            ranges: ptr::null(),
            slopes: slopes.as_ref().map_or(ptr::null(), |(address, _)| *address as *const f32),
            done: done.map_or(ptr::null(), |(region, _)| scratch.at(region) as *const i32),
            q_strides: q.strides,
            k_strides: k.strides,
            v_strides: v.strides,
            out_strides: out.strides,
            batch: to_i32("batch", batch)?,
            num_heads: to_i32("num_heads", num_heads)?,
            num_kv_heads: to_i32("num_kv_heads", num_kv_heads)?,
            head_dim: to_i32("head_dim", head_dim)?,
            q_len: to_i32("q_len", q_rows)?,
            k_len: to_i32("k_len", k_rows)?,
            q_rows: to_i32("rows of q", q_rows)?,
            k_rows: to_i32("rows of k", k_rows)?,
            page_len: 0,
            pages_per_sequence: 0,
            num_ranges: 0,
            left,
            right,
            heads_per_section: to_i32("heads", heads_per_section.min(num_heads))?,
            softmax_scale: self.softmax_scale,
            softcap: self.softcap.unwrap_or_default(),
        };
        let (kernel, size) = self.kernel(launcher);
        let enqueue = |params: FlashParams| {
            let tiles = (params.q_len as usize).div_ceil(FEWEST_ROWS) * size.get().div_ceil(MOST_COLUMNS);
            let items = params.batch as usize * num_heads * tiles;
            // SAFETY: the kernels take FlashParams, and tensor maps are those of q, k and v. Tensors and counter
            // outlive the launch on this stream. The kernel cuts lengths and page numbers, which the host has not
            // seen, to the rows that exist.
            unsafe {
                let function = Function::new(kernel, T::DTYPE, size);
                launcher.launch_on(function, [q, k, v], &params, Grid::Persistent { items })
            }
        };
        let Some(Sequences { starts: [q_starts, k_starts], longest: [q_len, k_len], pages }) = &self.sequences else {
            return enqueue(whole);
        };
        let (table, ranges) =
            (pages.as_ref().map(|pages| &pages.table), pages.as_ref().and_then(|p| p.ranges.as_ref()));
        let held = [Some(q_starts), Some(k_starts), table, ranges].map(|held| held.map(Tensor::storage_and_layout));
        let [starts_q, starts_k, table, ranges] = held.each_ref().map(|held| integers(held.as_ref(), stream));
        let (starts_q, starts_k, table, ranges) = (starts_q?, starts_k?, table?, ranges?);
        enqueue(FlashParams {
            q_starts: starts_q.0,
            k_starts: starts_k.0,
            pages: table.0,
            ranges: ranges.0,
            batch: to_i32("batch", q_starts.elem_count() - 1)?,
            q_len: to_i32("max_seqlen_q", *q_len)?,
            k_len: to_i32("max_seqlen_k", *k_len)?,
            page_len: to_i32("page_block_size", pages.as_ref().map_or(0, |pages| pages.page_len))?,
            pages_per_sequence: to_i32("block_table", pages.as_ref().map_or(0, |pages| pages.table.dims()[1]))?,
            num_ranges: to_i32("mm_prefix_ranges", pages.as_ref().map_or(0, PageTable::num_ranges))?,
            ..whole
        })
    }
}

pub(crate) fn cuda(error: CudaError) -> FlashAttnError {
    FlashAttnError::Attn(error.into())
}

/// The address of integers of 32 bits, or null, and a guard that ends the stream's use of them when dropped.
pub(crate) fn integers<'a>(
    held: Option<&'a (impl Deref<Target = Storage>, &'a Layout)>,
    stream: &'a CudaStream,
) -> Result<(*const i32, Option<SyncOnDrop<'a>>), CudaError> {
    let Some((storage, layout)) = held else { return Ok((ptr::null(), None)) };
    let (address, guard) = match storage.dtype() {
        DType::I32 => unaligned_address::<i32>(storage, layout, stream)?,
        _ => unaligned_address::<u32>(storage, layout, stream)?,
    };
    Ok((address as *const i32, Some(guard)))
}

/// Integers in 32 bits on `device`, contiguous. They are not read by the host, unless they are on it.
pub(crate) fn on_device(name: &'static str, tensor: &Tensor, device: &Device) -> Result<Tensor, FlashAttnError> {
    let narrow = match tensor.dtype() {
        DType::U32 | DType::I32 => tensor.clone(),
        DType::I64 => tensor.to_dtype(DType::U32)?,
        got => return Err(FlashAttnError::DType { name, expected: "U32, I32 or I64", got }),
    };
    Ok(narrow.to_device(device)?.contiguous()?)
}
