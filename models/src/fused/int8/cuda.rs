//! Launches of the kernels for keys and values in 8 bits. The callers check the element type and the head size.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use candle_core::cuda_backend::CudaDType;
use candle_core::{DType, Error, Layout, Storage, Tensor};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, sys};
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Regions, View, address, check_i32, cuda_storage, to_i32};
use s2o_kernels::decode::{Parts, blocks};
use s2o_kernels::params::{AttnParams, Int8Params, Int8SplitParams, RowState, SplitParams, Strides};
use s2o_kernels::{Function, Kernel, MERGE_WARPS, decoder};

use super::Int8Rows;
use crate::fused::written::{written, written_at};

type Result<T> = std::result::Result<T, CudaError>;

pub(super) fn store(int8: &Int8Rows, rows: &Tensor, range: Range<usize>) -> Result<()> {
    match rows.dtype() {
        DType::BF16 => store_of::<bf16>(int8, rows, range),
        _ => store_of::<f16>(int8, rows, range),
    }
}

fn store_of<T: Element>(int8: &Int8Rows, rows: &Tensor, range: Range<usize>) -> Result<()> {
    let launcher = Launcher::of(rows)?;
    let stream = launcher.stream();
    written::<T>(rows, stream, |rows| {
        written::<u8>(&int8.codes, stream, |codes| {
            written_at::<f32>(&int8.scales, stream, |base, layout| {
                let scales = Scales::new(base, layout)?;
                launch::<T>(&launcher, Kernel::StoreInt8, rows, codes, scales, range)
            })
        })
    })
}

pub(super) fn load(int8: &Int8Rows, rows: &Tensor, range: Range<usize>) -> Result<()> {
    match rows.dtype() {
        DType::BF16 => load_of::<bf16>(int8, rows, range),
        _ => load_of::<f16>(int8, rows, range),
    }
}

fn load_of<T: Element>(int8: &Int8Rows, rows: &Tensor, range: Range<usize>) -> Result<()> {
    let launcher = Launcher::of(rows)?;
    let stream = launcher.stream();
    let (codes, scales) = (int8.codes.storage_and_layout(), int8.scales.storage_and_layout());
    let (of_codes, _codes) = base::<u8>(&codes.0, stream)?;
    let (of_scales, _scales) = base::<f32>(&scales.0, stream)?;
    let (codes, scales) = (View::new::<u8>(of_codes, codes.1)?, Scales::new(of_scales, scales.1)?);
    written::<T>(rows, stream, |rows| launch::<T>(&launcher, Kernel::LoadInt8, rows, codes, scales, range))
}

/// The address of a tensor's storage, and a guard that ends the stream's use of it when dropped.
fn base<'a, T: CudaDType + DeviceRepr + 'a>(
    storage: &'a Storage,
    stream: &'a CudaStream,
) -> Result<(sys::CUdeviceptr, SyncOnDrop<'a>)> {
    Ok(cuda_storage(storage)?.as_cuda_slice::<T>()?.device_ptr(stream))
}

/// Scales `(batch, heads, capacity)` in device memory.
#[derive(Clone, Copy)]
struct Scales {
    address: sys::CUdeviceptr,
    strides: Strides,
}

impl Scales {
    fn new(base: sys::CUdeviceptr, layout: &Layout) -> Result<Self> {
        let &[batch, head, seq] = layout.stride() else {
            return Err(Error::Msg(format!("expected scales (batch, heads, capacity), got {layout:?}")).bt().into());
        };
        Ok(Self {
            address: base + (layout.start_offset() * size_of::<f32>()) as u64,
            strides: Strides { batch: batch as i64, seq: seq as i64, head: head as i64 },
        })
    }
}

/// Enqueues a kernel for the rows of positions `range`.
fn launch<T: Element>(
    launcher: &Launcher,
    kernel: Kernel,
    rows: View,
    codes: View,
    scales: Scales,
    range: Range<usize>,
) -> Result<()> {
    let [batch, len, heads, head_dim] = rows.dims;
    let expected = [batch, range.end, heads, head_dim];
    let fits = |dims: [usize; 4]| dims[1] >= range.end && [dims[0], dims[2], dims[3]] == [batch, heads, head_dim];
    if !fits(codes.dims) || len < range.end {
        let message = format!("expected rows and codes {expected:?}, got {:?} and {:?}", rows.dims, codes.dims);
        return Err(Error::Msg(message).bt().into());
    }
    let size = s2o_cuda::head_dim(kernel, head_dim)?;
    let rows_of_sequence = range.len() * heads;
    check_i32("rows", rows_of_sequence)?;
    let params = Int8Params {
        rows: rows.rows_from(range.start, size_of::<T>()).address as *mut c_void,
        codes: codes.rows_from(range.start, 1).address as *mut u8,
        scales: (scales.address + (range.start * size_of::<f32>()) as u64) as *mut f32,
        row_strides: rows.strides,
        code_strides: codes.strides,
        scale_strides: scales.strides,
        len: to_i32("positions", range.len())?,
        num_heads: to_i32("heads", heads)?,
    };
    let grid = Grid::Blocks([decoder::int8_blocks(rows_of_sequence, head_dim), batch, 1]);
    // SAFETY: the grid covers the rows of `range`, which rows, codes and scales (of the codes' positions) have; the
    // caller holds all three until the launch is enqueued.
    unsafe { launcher.launch(Function::new(kernel, T::DTYPE, size), &params, grid) }
}

pub(super) fn decode(q: &Tensor, kv: [&Int8Rows; 2], len: usize, softmax_scale: f32) -> Result<Tensor> {
    match q.dtype() {
        DType::BF16 => decode_of::<bf16>(q, kv, len, softmax_scale),
        _ => decode_of::<f16>(q, kv, len, softmax_scale),
    }
}

fn decode_of<T: Element>(q: &Tensor, kv: [&Int8Rows; 2], len: usize, softmax_scale: f32) -> Result<Tensor> {
    let launcher = Launcher::of(q)?;
    let stream = launcher.stream();
    let (batch, _, num_heads, head_dim) = q.dims4()?;
    let size = s2o_cuda::head_dim(Kernel::DecodeInt8, head_dim)?;
    let parts = Parts::new(len);
    let heads = batch * num_heads;
    let mut regions = Regions::default();
    let partial_out = regions.add::<f32>(parts.rows(heads) * head_dim);
    let partial_state = regions.add::<RowState>(parts.rows(heads));
    let scratch = launcher.allocate(&regions)?;
    let mut out = launcher.uninit::<T>(q.shape())?;
    {
        let codes = kv.map(|rows| rows.codes.storage_and_layout());
        let scales = kv.map(|rows| rows.scales.storage_and_layout());
        let q = q.storage_and_layout();
        let (q_address, _q) = address::<T>(&q.0, q.1, stream)?;
        let (k_base, _k) = base::<u8>(&codes[0].0, stream)?;
        let (v_base, _v) = base::<u8>(&codes[1].0, stream)?;
        let (k, v) = (View::new::<u8>(k_base, codes[0].1)?, View::new::<u8>(v_base, codes[1].1)?);
        let (k_base, _k_scales) = base::<f32>(&scales[0].0, stream)?;
        let (v_base, _v_scales) = base::<f32>(&scales[1].0, stream)?;
        let (k_scales, v_scales) = (Scales::new(k_base, scales[0].1)?, Scales::new(v_base, scales[1].1)?);
        let [k_batch, capacity, num_kv_heads, k_dim] = k.dims;
        if k.dims != v.dims
            || k_scales.strides != v_scales.strides
            || (k_batch, k_dim) != (batch, head_dim)
            || !num_heads.is_multiple_of(num_kv_heads)
            || !(1..=capacity).contains(&len)
        {
            let message =
                format!("decoding in 8 bits: q {:?}, keys {:?}, values {:?}, {len} keys", q.1, k.dims, v.dims);
            return Err(Error::Msg(message).bt().into());
        }
        let (out, _out) = out.device_ptr_mut(stream);
        let rows = View::new::<T>(out, q.1)?.strides;
        let attn = AttnParams {
            q: q_address as *const c_void,
            k: k.address as *const c_void,
            v: v.address as *const c_void,
            out: out as *mut c_void,
            lse: ptr::null_mut(),
            next_item: ptr::null_mut(),
            q_strides: rows,
            k_strides: k.strides,
            v_strides: v.strides,
            out_strides: rows,
            batch: to_i32("batch", batch)?,
            num_heads: to_i32("num_heads", num_heads)?,
            num_kv_heads: to_i32("num_kv_heads", num_kv_heads)?,
            q_len: 1,
            k_len: to_i32("k_len", len)?,
            causal: 0,
            heads_per_section: to_i32("heads", heads)?,
            softmax_scale,
            cap_scale: 0.0,
            head_dim: to_i32("head_dim", head_dim)?,
        };
        let split = SplitParams {
            attn,
            partial_out: scratch.at(partial_out),
            partial_state: scratch.at(partial_state),
            first_row: 0,
            num_splits: to_i32("parts", parts.count)?,
            tiles_per_split: to_i32("tiles per part", parts.tiles)?,
            head_dim: to_i32("head_dim", head_dim)?,
            tile_rows: 1,
            merge_warps: MERGE_WARPS as i32,
            group: 1,
        };
        let params = Int8SplitParams {
            split,
            scales: [k_scales, v_scales].map(|scales| scales.address as *const f32),
            scale_batch_stride: k_scales.strides.batch,
            scale_head_stride: k_scales.strides.head,
        };
        let function = |kernel| Function::new(kernel, T::DTYPE, size);
        let blocks = blocks(batch, num_kv_heads, num_heads / num_kv_heads);
        // SAFETY: the checks above are those of the kernels; the partial results have room for every part, and the
        // scratch memory is released on this stream after both kernels.
        unsafe {
            launcher.launch(function(Kernel::DecodeInt8), &params, Grid::Blocks([blocks, parts.count, 1]))?;
            if parts.count > 1 {
                let rows = Grid::Warps { rows: heads * MERGE_WARPS };
                launcher.launch(function(Kernel::Merge), &split, rows)?;
            }
        }
    }
    Ok(launcher.tensor(out, q.shape().clone()))
}
