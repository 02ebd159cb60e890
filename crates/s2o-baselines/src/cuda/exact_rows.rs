//! Exact attention of chosen queries: the launch of the kernels that compute S2O's probes.

use std::ffi::c_void;

use candle_core::{DType, Layout, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, Regions, View, address, cuda_storage, to_i32};
use s2o_kernels::params::{AttnParams, ProbeParams, RowState, SplitParams};
use s2o_kernels::{Function, Kernel, TILE_K, TILE_Q};

use super::shape_mismatch;

/// Parts of the keys per multiprocessor: items end at very different lengths.
const SPLITS_PER_SM: usize = 16;
/// Fewest key tiles of a part.
const MIN_TILES: usize = 4;

/// Causal attention of the queries at `positions`, which ascend and lie in consecutive runs that are cut at multiples
/// of `stride`: `(batch, rows, num_heads, head_dim)` as `q`.
///
/// - `q`: `(batch, rows, num_heads, head_dim)`, the query at each position; `k`, `v`: `(batch, k_len, num_kv_heads,
///   head_dim)`; bf16 or f16 on one GPU, head_dim 64, 128 or 256.
///
/// # Errors
/// If the tensors do not fit each other, or the GPU fails.
pub(crate) fn exact_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    stride: usize,
    positions: &[usize],
) -> Result<Tensor, CudaError> {
    match q.dtype() {
        DType::BF16 => typed::<bf16>([q, k, v], softmax_scale, stride, positions),
        DType::F16 => typed::<f16>([q, k, v], softmax_scale, stride, positions),
        got => Err(CudaError::DType { name: "q", got }),
    }
}

fn typed<T: Element>(
    [q, k, v]: [&Tensor; 3],
    softmax_scale: f32,
    stride: usize,
    positions: &[usize],
) -> Result<Tensor, CudaError> {
    let (batch, slots, heads, head_dim) = q.dims4()?;
    let (_, k_len, kv_heads, _) = k.dims4()?;
    let fits = k.dims() == v.dims() && k.dim(0)? == batch && k.dim(3)? == head_dim && heads.is_multiple_of(kv_heads);
    if !fits || slots != positions.len() || positions.last().is_none_or(|&last| last >= k_len) {
        return Err(shape_mismatch(q, k, "exact-rows"));
    }
    let size = s2o_cuda::head_dim(Kernel::Probes, head_dim)?;
    let launcher = Launcher::of(q)?;
    let stream = launcher.stream();
    // The heads of a KV head share the tiles.
    let (group, rows) = (heads / kv_heads, slots * heads / kv_heads);
    let grouped = q.reshape((batch, slots, kv_heads, group, head_dim))?.transpose(2, 3)?.contiguous()?;
    let grouped = grouped.reshape((batch, rows, kv_heads, head_dim))?;
    let positions_of_head = positions.iter().map(|&position| position as u32).collect::<Vec<_>>();
    let positions_of_all = Tensor::new(positions_of_head.repeat(batch * heads), q.device())?;

    let (tiles, key_tiles) = (batch * kv_heads * rows.div_ceil(TILE_Q), k_len.div_ceil(TILE_K));
    let parts = (SPLITS_PER_SM * launcher.multiprocessors() / tiles).min(key_tiles / MIN_TILES).max(1);
    let per_part = key_tiles.div_ceil(parts);
    let parts = key_tiles.div_ceil(per_part);
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let lse = regions.add::<f32>(batch * kv_heads * rows);
    let partial_out = regions.add::<f32>(tiles * parts * TILE_Q * head_dim);
    let partial_state = regions.add::<RowState>(tiles * parts * TILE_Q);
    let scratch = launcher.allocate(&regions)?;
    scratch.zero(next_item)?;
    let mut out = launcher.uninit::<T>(grouped.shape())?;
    {
        let [q, k, v] = [&grouped, k, v].map(Tensor::storage_and_layout);
        let q = Operand::new(cuda_storage(&q.0)?, q.1)?;
        let (k, v) = (Operand::new(cuda_storage(&k.0)?, k.1)?, Operand::new(cuda_storage(&v.0)?, v.1)?);
        let ((q, _q), (k, _k), (v, _v)) = (q.view::<T>(stream)?, k.view::<T>(stream)?, v.view::<T>(stream)?);
        let at = positions_of_all.storage_and_layout();
        let (at, _at) = address::<u32>(&at.0, at.1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        let split = SplitParams {
            attn: AttnParams {
                q: q.address as *const c_void,
                k: k.address as *const c_void,
                v: v.address as *const c_void,
                out: out as *mut c_void,
                lse: scratch.at(lse),
                next_item: scratch.at(next_item),
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                out_strides: View::new::<T>(out, &Layout::contiguous(grouped.shape()))?.strides,
                batch: to_i32("batch", batch)?,
                num_heads: to_i32("num_kv_heads", kv_heads)?,
                num_kv_heads: to_i32("num_kv_heads", kv_heads)?,
                q_len: to_i32("rows", rows)?,
                k_len: to_i32("keys", k_len)?,
                causal: 1,
                heads_per_section: 1,
                softmax_scale,
                cap_scale: 0.0,
                head_dim: to_i32("head_dim", head_dim)?,
            },
            partial_out: scratch.at(partial_out),
            partial_state: scratch.at(partial_state),
            first_row: 0,
            num_splits: to_i32("splits", parts)?,
            tiles_per_split: to_i32("tiles per split", per_part)?,
            head_dim: to_i32("head_dim", head_dim)?,
            tile_rows: TILE_Q as i32,
            merge_warps: 1,
            group: 1,
        };
        let runs = [to_i32("rows", slots)?, to_i32("stride", stride.min(k_len))?];
        let queries = to_i32("queries", k_len - positions[0])?;
        let params = ProbeParams::exact(split, at as *mut i32, to_i32("num_heads", heads)?, queries, runs);
        let function = |kernel| Function::new(kernel, T::DTYPE, size);
        // SAFETY: the kernels take ProbeParams, and `merge` the SplitParams in it; the views have the sizes of the
        // shapes, the scratch memory has room for every item, and everything is held until the launches are enqueued.
        unsafe {
            let items = Grid::Persistent { items: tiles * parts };
            launcher.launch_on(function(Kernel::Probes), [q, k, v], &params, items)?;
            launcher.launch(function(Kernel::Merge), &params.split, Grid::Warps { rows: batch * kv_heads * rows })?;
        }
    }
    let out = launcher.tensor(out, Shape::from((batch, slots, group, kv_heads, head_dim)));
    Ok(out.transpose(2, 3)?.contiguous()?.reshape(q.shape())?)
}
