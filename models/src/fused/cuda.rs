//! Launches of the decoder's kernels. The callers check shapes; this module checks the other needs of the kernels.

use std::ffi::c_void;
use std::ptr;

use candle_core::{DType, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, View, address, check_i32, to_i32};
use s2o_kernels::params::{JoinHeadsParams, NormParams, RotateParams, RotationParams, SiluParams};
use s2o_kernels::{Dtype, Function, Kernel, decoder};

use super::int8_linear::cuda::{Quantised, rows_grid};
use super::written::{with_width, written};
use super::{Heads, QkNorm, RotatedInt8};

type Result<T> = std::result::Result<T, CudaError>;

/// `x + delta` (if there is a delta) and its RMS norm. Inputs are contiguous, `x` and `delta` of one shape.
pub(super) fn rms_norm(
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<(Option<Tensor>, Tensor)> {
    let launcher = Launcher::of(x)?;
    match x.dtype() {
        DType::BF16 => norm_of::<bf16>(&launcher, x, delta, weight, eps),
        _ => norm_of::<f16>(&launcher, x, delta, weight, eps),
    }
}

fn norm_of<T: Element>(
    launcher: &Launcher,
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<(Option<Tensor>, Tensor)> {
    let mut out = launcher.uninit::<T>(x.shape())?;
    let sum = {
        let (out, _out) = out.device_ptr_mut(launcher.stream());
        norm::<T>(launcher, Kernel::RmsNorm, [x, weight], delta, eps, (out as *mut c_void, ptr::null_mut()))?
    };
    Ok((sum, launcher.tensor(out, x.shape().clone())))
}

/// [`rms_norm`], quantised.
pub(super) fn rms_norm_int8(
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<(Option<Tensor>, RotatedInt8)> {
    let launcher = Launcher::of(x)?;
    let mut out = Quantised::new(&launcher, x.shape(), weight.elem_count())?;
    let sum = {
        let (values, scales, _guards) = out.addresses(launcher.stream());
        let norm = match x.dtype() {
            DType::BF16 => norm::<bf16>,
            _ => norm::<f16>,
        };
        norm(&launcher, Kernel::RmsNormInt8, [x, weight], delta, eps, (values, scales))?
    };
    Ok((sum, out.written(&launcher, x.dtype())))
}

/// Writes the norm of `x + delta` to the addresses `out` of rows and, for [`Kernel::RmsNormInt8`], of their scales.
/// Returns the sum.
fn norm<T: Element>(
    launcher: &Launcher,
    kernel: Kernel,
    [x, weight]: [&Tensor; 2],
    delta: Option<&Tensor>,
    eps: f32,
    (out, scales): (*mut c_void, *mut f32),
) -> Result<Option<Tensor>> {
    let stream = launcher.stream();
    let width = weight.elem_count();
    let rows = x.elem_count() / width;
    let shape = x.shape().clone();
    let mut sum = delta.map(|_| launcher.uninit::<T>(x.shape())).transpose()?;
    {
        let (x, weight) = (x.storage_and_layout(), weight.storage_and_layout());
        let delta = delta.map(Tensor::storage_and_layout);
        let (x, _x) = address::<T>(&x.0, x.1, stream)?;
        let (weight, _weight) = address::<T>(&weight.0, weight.1, stream)?;
        let delta = delta.as_ref().map(|delta| address::<T>(&delta.0, delta.1, stream)).transpose()?;
        let sum = sum.as_mut().map(|sum| sum.device_ptr_mut(stream));
        let params = NormParams {
            x: x as *const c_void,
            delta: delta.as_ref().map_or(ptr::null(), |(delta, _)| *delta as *const c_void),
            weight: weight as *const c_void,
            sum: sum.as_ref().map_or(ptr::null_mut(), |(sum, _)| *sum as *mut c_void),
            out,
            scales,
            width: to_i32("row width", width)?,
            eps,
        };
        let function = Function::new(kernel, T::DTYPE, ANY_HEAD_DIM);
        // SAFETY: one thread block per row of contiguous tensors of equal shape, all held until the launch is enqueued;
        // the caller has the memory of `out` and `scales`.
        unsafe { launcher.launch(function, &params, rows_grid(rows, decoder::row_threads(width))) }?;
    }
    Ok(sum.map(|sum| launcher.tensor(sum, shape)))
}

/// `silu(gate) * up` of contiguous rows `gate | up`.
pub(super) fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    match gate_up.dtype() {
        DType::BF16 => silu::<bf16>(gate_up),
        _ => silu::<f16>(gate_up),
    }
}

fn silu<T: Element>(gate_up: &Tensor) -> Result<Tensor> {
    let launcher = Launcher::of(gate_up)?;
    let stream = launcher.stream();
    let width = gate_up.dims().last().map_or(0, |width| width / 2);
    let shape = with_width(gate_up.dims(), width);
    let rows = shape.elem_count() / width;
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let gate_up = gate_up.storage_and_layout();
        let (gate_up, _gate_up) = address::<T>(&gate_up.0, gate_up.1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        let params = SiluParams { gate_up: gate_up as *const c_void, out: out as *mut c_void, width: width as i64 };
        let function = Function::new(Kernel::SiluMul, T::DTYPE, ANY_HEAD_DIM);
        // SAFETY: the grid covers every row of contiguous tensors, both held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([rows, decoder::silu_blocks(width), 1])) }?;
    }
    Ok(launcher.tensor(out, shape))
}

/// cos and sin of positions `start .. start + len`: `(2, len, frequencies)`, f32.
pub(super) fn rotation_table(inverse_frequencies: &Tensor, factor: f64, start: usize, len: usize) -> Result<Tensor> {
    let launcher = Launcher::of(inverse_frequencies)?;
    let stream = launcher.stream();
    let half = inverse_frequencies.elem_count();
    let shape = Shape::from((2, len, half));
    let mut table = launcher.uninit::<f32>(&shape)?;
    {
        let inverse_frequencies = inverse_frequencies.storage_and_layout();
        let (inverse_frequencies, _frequencies) =
            address::<f32>(&inverse_frequencies.0, inverse_frequencies.1, stream)?;
        let (table, _table) = table.device_ptr_mut(stream);
        let params = RotationParams {
            inverse_frequencies: inverse_frequencies as *const f32,
            table: table as *mut f32,
            factor,
            start: start as i64,
            len: to_i32("positions", len)?,
            half: to_i32("frequencies", half)?,
        };
        let function = Function::new(Kernel::RotationTable, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: one thread per entry; both tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([decoder::table_blocks(len * half), 1, 1])) }?;
    }
    Ok(launcher.tensor(table, shape))
}

/// Normalises and rotates q and k of contiguous `qkv` `(batch, len, ..)`, writes k and v into rows `start..` of the
/// caches, and returns q.
pub(super) fn rotate(
    qkv: &Tensor,
    heads: Heads,
    norm: Option<QkNorm>,
    table: &Tensor,
    caches: (&Tensor, &Tensor),
    start: usize,
) -> Result<Tensor> {
    match qkv.dtype() {
        DType::BF16 => turn::<bf16>(qkv, heads, norm, table, caches, start),
        _ => turn::<f16>(qkv, heads, norm, table, caches, start),
    }
}

fn turn<T: Element>(
    qkv: &Tensor,
    heads: Heads,
    norm: Option<QkNorm>,
    table: &Tensor,
    (k_cache, v_cache): (&Tensor, &Tensor),
    start: usize,
) -> Result<Tensor> {
    let launcher = Launcher::of(qkv)?;
    let stream = launcher.stream();
    let (batch, len, _) = qkv.dims3()?;
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    let shape = Shape::from((batch, len, num_heads, head_dim));
    let mut q_out = launcher.uninit::<T>(&shape)?;
    // The caller has checked that the kernels support this size.
    let size = s2o_cuda::head_dim(Kernel::Rotate, head_dim)?;
    let mut enqueue = |k: View, v: View| {
        let (qkv, table) = (qkv.storage_and_layout(), table.storage_and_layout());
        let norms = norm.map(|norm| [norm.q, norm.k].map(Tensor::storage_and_layout));
        let (qkv, _qkv) = address::<T>(&qkv.0, qkv.1, stream)?;
        let (table, _table) = address::<f32>(&table.0, table.1, stream)?;
        let norms = norms.iter().flatten().map(|norm| address::<T>(&norm.0, norm.1, stream));
        let norms = norms.collect::<Result<Vec<_>>>()?;
        let norm_at = |i: usize| norms.get(i).map_or(ptr::null(), |(norm, _)| *norm as *const c_void);
        let (q_out, _q_out) = q_out.device_ptr_mut(stream);
        let params = RotateParams {
            qkv: qkv as *const c_void,
            q_norm: norm_at(0),
            k_norm: norm_at(1),
            table: table as *const f32,
            q_out: q_out as *mut c_void,
            k_out: k.rows_from(start, size_of::<T>()).address as *mut c_void,
            v_out: v.rows_from(start, size_of::<T>()).address as *mut c_void,
            k_strides: k.strides,
            v_strides: v.strides,
            len: to_i32("positions", len)?,
            num_heads: to_i32("num_heads", num_heads)?,
            num_kv_heads: to_i32("num_kv_heads", num_kv_heads)?,
            eps: norm.map_or(0.0, |norm| norm.eps as f32),
        };
        check_i32("rows", batch * len)?;
        let function = Function::new(Kernel::Rotate, T::DTYPE, size);
        let threads = Some(decoder::rotate_threads(num_heads + 2 * num_kv_heads, head_dim));
        let grid = Grid::Shaped { blocks: [batch * len, 1, 1], threads, shared_bytes: None };
        // SAFETY: one thread block per position; the caches have room for `len` rows from `start` on (the caller
        // checked), and everything is held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, grid) }
    };
    written::<T>(k_cache, stream, |k| {
        written::<T>(v_cache, stream, |v| enqueue(k, v))?;
        Ok(())
    })?;
    Ok(launcher.tensor(q_out, shape))
}

/// [`join_heads`](super::join_heads) of contiguous `x`, with groups of a multiple of 8 columns.
pub(super) fn join_heads(x: &Tensor, ranks: usize, slots: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::BF16 => joined::<bf16>(x, ranks, slots),
        _ => joined::<f16>(x, ranks, slots),
    }
}

fn joined<T: Element>(x: &Tensor, ranks: usize, slots: &Tensor) -> Result<Tensor> {
    let launcher = Launcher::of(x)?;
    let stream = launcher.stream();
    let (sent, width) = x.dims2()?;
    let (rows, groups) = (sent / ranks, slots.elem_count());
    let shape = Shape::from((rows, ranks * width));
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let (x, slots) = (x.storage_and_layout(), slots.storage_and_layout());
        let (x, _x) = address::<T>(&x.0, x.1, stream)?;
        let (slots, _slots) = address::<u32>(&slots.0, slots.1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        check_i32("elements of a few rows", decoder::JOIN_ROWS * ranks * width)?;
        let params = JoinHeadsParams {
            x: x as *const c_void,
            slots: slots as *const u32,
            out: out as *mut c_void,
            rows: rows as i64,
            groups: to_i32("groups of heads", groups)?,
            of_rank: to_i32("groups of a rank", groups / ranks)?,
            pieces: to_i32("pieces of a group", ranks * width / groups / decoder::VECTOR)?,
        };
        let function = Function::new(Kernel::JoinHeads, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: the grid covers all rows of the output; contiguous tensors, all held until the launch is enqueued; the
        // caller has checked the shapes, and slots are below the number of groups.
        unsafe { launcher.launch(function, &params, Grid::Blocks([rows.div_ceil(decoder::JOIN_ROWS), 1, 1])) }?;
    }
    Ok(launcher.tensor(out, shape))
}
