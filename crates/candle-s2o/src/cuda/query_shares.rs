//! Launches of the kernels that add up the attention of a call's last queries.

use std::ffi::c_void;
use std::ptr;

use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{DType, Shape, Storage, Tensor};
use half::{bf16, f16};
use s2o_core::{AttnShape, S2oError};
use s2o_kernels::params::{LastQueryParams, RowState};
use s2o_kernels::{Function, HeadDim, Kernel};

use super::error::{CudaError, int};
use super::fused::{Launcher, tensor};
use super::operand::{Element, Operand};
use crate::error::AttnError;

/// Most queries whose attention is added up.
pub const MOST_LAST_QUERIES: usize = 128;

/// Keys of a tile, and distances of a block.
const TILE: usize = 64;
/// Tiles of a block of threads, at least: two more are computed beside them.
const LEAST_TILES: usize = 16;
/// Blocks of threads for each multiprocessor, which holds two at a time: enough that all end at about the same time.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

/// What each key gets of the attention of the last `count` queries of a causal call, or as many as it has, their mean:
/// `(batch, num_heads, k_len)` of f32 with sum 1. `q` `(batch, q_len, num_heads, head_dim)`, `k` `(batch, k_len,
/// num_kv_heads, head_dim)`, bf16 or f16 on one GPU, head_dim 64 or 128, any strides; the queries are the last of the
/// positions. Sums are in f32 and do not depend on an order of arrival.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`CudaError::Keys`] unless `count` is 1 to [`MOST_LAST_QUERIES`].
pub fn attention_by_key(q: &Tensor, k: &Tensor, softmax_scale: f32, count: usize) -> Result<Tensor, AttnError> {
    Ok(shares(q, k, softmax_scale, count, false)?.0)
}

/// [`attention_by_key`], and the same attention by the distance from query back to key, of the same shape. Distances that
/// not all of the queries have are sums over those that do, divided by all.
///
/// # Errors
/// As [`attention_by_key`].
pub fn attention_by_key_and_distance(
    q: &Tensor,
    k: &Tensor,
    softmax_scale: f32,
    count: usize,
) -> Result<[Tensor; 2], AttnError> {
    match shares(q, k, softmax_scale, count, true)? {
        (by_key, Some(by_distance)) => Ok([by_key, by_distance]),
        (_, None) => unreachable!("distances were asked for"),
    }
}

fn shares(
    q: &Tensor,
    k: &Tensor,
    softmax_scale: f32,
    count: usize,
    distances: bool,
) -> Result<(Tensor, Option<Tensor>), AttnError> {
    let shape = checked(q, k, softmax_scale)?;
    if count == 0 || count > MOST_LAST_QUERIES {
        let expected = format!("1 to {MOST_LAST_QUERIES}");
        return Err(CudaError::Keys { name: "last queries", expected, got: count }.into());
    }
    let rows = count.min(shape.q_len());
    let last = q.narrow(1, shape.q_len() - rows, rows)?;
    match q.dtype() {
        DType::BF16 => typed::<bf16>(&last, k, &shape, softmax_scale, distances),
        DType::F16 => typed::<f16>(&last, k, &shape, softmax_scale, distances),
        got => Err(CudaError::DType { name: "q", got }.into()),
    }
}

/// The sizes of a call whose tensors fit each other.
fn checked(q: &Tensor, k: &Tensor, softmax_scale: f32) -> Result<AttnShape, AttnError> {
    let dims = |name, x: &Tensor| {
        <[usize; 4]>::try_from(x.dims()).map_err(|_| AttnError::Rank { name, got: x.dims().to_vec() })
    };
    let (q_dims, k_dims) = (dims("q", q)?, dims("k", k)?);
    let shape = AttnShape::of(q_dims, k_dims, k_dims).map_err(S2oError::from)?;
    if !softmax_scale.is_finite() {
        return Err(S2oError::SoftmaxScale { got: softmax_scale }.into());
    }
    if q.dtype() != k.dtype() {
        return Err(AttnError::DTypeMismatch { name: "k", expected: q.dtype(), got: k.dtype() });
    }
    if !k.device().same_device(q.device()) {
        let (expected, got) = (q.device().location(), k.device().location());
        return Err(AttnError::DeviceMismatch { name: "k", expected, got });
    }
    Ok(shape)
}

/// `last`: the queries to add up.
fn typed<T: Element>(
    last: &Tensor,
    k: &Tensor,
    shape: &AttnShape,
    softmax_scale: f32,
    distances: bool,
) -> Result<(Tensor, Option<Tensor>), AttnError> {
    let head_dim = HeadDim::new(shape.head_dim()).ok_or(CudaError::HeadDim { got: shape.head_dim() })?;
    if !last.device().is_cuda() {
        return Err(AttnError::GpuOnly { what: "attention by key" });
    }
    let launcher = Launcher::of(last)?;
    let stream = &launcher.stream;
    let (rows, heads) = (last.dim(1)?, shape.batch() * shape.num_heads());
    let tiles = shape.k_len().div_ceil(TILE);
    let chunks = (launcher.multiprocessors() * BLOCKS_PER_MULTIPROCESSOR).div_ceil(heads);
    let tiles_per_chunk = tiles.div_ceil(chunks).max(LEAST_TILES);
    let state_chunks = tiles.div_ceil(tiles_per_chunk);
    // One block of distances beyond the tiles at both ends.
    let share_chunks = (tiles + 2).div_ceil(tiles_per_chunk);
    let out_shape = Shape::from((shape.batch(), shape.num_heads(), shape.k_len()));
    let per_state = size_of::<RowState>() / size_of::<f32>();
    let mut states = launcher.uninit::<f32>(&Shape::from(heads * state_chunks * MOST_LAST_QUERIES * per_state))?;
    let mut by_key = launcher.uninit::<f32>(&out_shape)?;
    let mut by_distance = distances.then(|| launcher.uninit::<f32>(&out_shape)).transpose()?;
    {
        let (q, k) = (last.storage_and_layout(), k.storage_and_layout());
        let (Storage::Cuda(q_storage), Storage::Cuda(k_storage)) = (&*q.0, &*k.0) else {
            return Err(AttnError::GpuOnly { what: "attention by key" });
        };
        let (q, k) = (Operand::new(q_storage, q.1)?, Operand::new(k_storage, k.1)?);
        let ((q, _q), (k, _k)) = (q.view::<T>(stream)?, k.view::<T>(stream)?);
        let (states, _states) = states.device_ptr_mut(stream);
        let (by_key, _by_key) = by_key.device_ptr_mut(stream);
        let by_distance = by_distance.as_mut().map(|by_distance| by_distance.device_ptr_mut(stream));
        // The kernels count a few tiles beyond the last key.
        int("keys", shape.k_len() + 4 * TILE)?;
        let params = LastQueryParams {
            q: q.address as *const c_void,
            k: k.address as *const c_void,
            states: states as *mut RowState,
            by_key: by_key as *mut f32,
            by_distance: by_distance.as_ref().map_or(ptr::null_mut(), |(address, _)| *address as *mut f32),
            q_strides: q.strides,
            k_strides: k.strides,
            num_heads: int("num_heads", shape.num_heads())?,
            num_kv_heads: int("num_kv_heads", shape.num_kv_heads())?,
            rows: int("queries", rows)?,
            k_len: int("keys", shape.k_len())?,
            tiles_per_chunk: int("key tiles", tiles_per_chunk)?,
            state_chunks: int("key tiles", state_chunks)?,
            softmax_scale,
        };
        for (kernel, chunks) in [(Kernel::LastQueryStates, state_chunks), (Kernel::LastQueryScores, share_chunks)] {
            let function = Function::new(kernel, T::DTYPE, head_dim);
            // SAFETY: both take these parameters; the views are of the shape's sizes, there is a state for each chunk, and
            // everything is held until the launches are enqueued.
            unsafe { launcher.launch(function, &params, [heads, chunks, 1], None) }?;
        }
    }
    let by_distance = by_distance.map(|slice| tensor(slice, &launcher.device, out_shape.clone()));
    Ok((tensor(by_key, &launcher.device, out_shape), by_distance))
}
