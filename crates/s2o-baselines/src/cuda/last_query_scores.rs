//! Attention of a call's last queries, summed by key and by distance from query back to key.

use std::ffi::c_void;
use std::ptr;

use candle_core::{DType, Shape, Tensor};
use candle_s2o::{AttnError, AttnShape, S2oError};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, check_i32, cuda_storage, to_i32};
use s2o_kernels::params::{LastQueryParams, RowState};
use s2o_kernels::{Function, Kernel};

use super::{check_size, supports_heads};

/// Largest number of queries whose attention is summed.
pub const MAX_LAST_QUERIES: usize = 128;

/// Keys per tile, and distances per block of distances.
const TILE: usize = 64;
/// Fewest tiles per thread block, which computes up to two more tiles in addition.
const MIN_TILES: usize = 16;
/// Thread blocks per multiprocessor, which runs two at a time: with 8, all multiprocessors end at about the same time.
const BLOCKS_PER_SM: usize = 8;

/// Whether the kernels support these tensors and this number of queries.
pub(crate) fn supports(q: &Tensor, k: &Tensor, count: usize) -> bool {
    supports_heads(q) && supports_heads(k) && q.dtype() == k.dtype() && (1..=MAX_LAST_QUERIES).contains(&count)
}

/// Mean attention that each key receives from the last `count` queries of a causal call, or from all if there are
/// fewer: `(batch, num_heads, k_len)` of f32 with sum 1 per head. Sums are in f32, in a fixed order.
///
/// - `q`: `(batch, q_len, num_heads, head_dim)`; the queries have the last positions.
/// - `k`: `(batch, k_len, num_kv_heads, head_dim)`. Both are bf16 or f16 on one GPU, head_dim 64 or 128, any strides.
///
/// # Errors
/// See [`AttnError`] if the tensors do not fit; [`CudaError::Size`] unless `count` is 1 to [`MAX_LAST_QUERIES`].
pub fn by_key(q: &Tensor, k: &Tensor, softmax_scale: f32, count: usize) -> Result<Tensor, AttnError> {
    let [by_key] = scores(q, k, softmax_scale, count)?;
    Ok(by_key)
}

/// Returns [`by_key`] and the same attention by distance from query back to key, of the same shape. A distance that
/// only some of the queries have is summed over these and divided by the number of all.
///
/// # Errors
/// As [`by_key`].
pub fn by_key_and_distance(q: &Tensor, k: &Tensor, softmax_scale: f32, count: usize) -> Result<[Tensor; 2], AttnError> {
    scores(q, k, softmax_scale, count)
}

/// The scores by key and, if `N` is 2, by distance.
fn scores<const N: usize>(q: &Tensor, k: &Tensor, softmax_scale: f32, count: usize) -> Result<[Tensor; N], AttnError> {
    let shape = checked(q, k, softmax_scale)?;
    let fits = (1..=MAX_LAST_QUERIES).contains(&count);
    check_size(fits, "last queries", format_args!("1 to {MAX_LAST_QUERIES}"), count)?;
    let rows = count.min(shape.q_len());
    let last = q.narrow(1, shape.q_len() - rows, rows)?;
    match q.dtype() {
        DType::BF16 => typed::<bf16, N>(&last, k, &shape, softmax_scale),
        DType::F16 => typed::<f16, N>(&last, k, &shape, softmax_scale),
        got => Err(CudaError::DType { name: "q", got }.into()),
    }
}

/// Checks that the tensors fit each other and returns the sizes of the call.
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

/// Runs the kernels for the queries `last`.
fn typed<T: Element, const N: usize>(
    last: &Tensor,
    k: &Tensor,
    shape: &AttnShape,
    softmax_scale: f32,
) -> Result<[Tensor; N], AttnError> {
    let head_dim = s2o_cuda::head_dim(Kernel::LastQueryScores, shape.head_dim())?;
    if !last.device().is_cuda() {
        return Err(AttnError::GpuOnly { what: "attention of the last queries" });
    }
    let launcher = Launcher::of(last)?;
    let stream = launcher.stream();
    let (rows, heads) = (last.dim(1)?, shape.batch() * shape.num_heads());
    let tiles = shape.k_len().div_ceil(TILE);
    let chunks = (launcher.multiprocessors() * BLOCKS_PER_SM).div_ceil(heads);
    let tiles_per_chunk = tiles.div_ceil(chunks).max(MIN_TILES);
    let state_chunks = tiles.div_ceil(tiles_per_chunk);
    // One more block of distances at each end of the tiles.
    let share_chunks = (tiles + 2).div_ceil(tiles_per_chunk);
    let out_shape = Shape::from((shape.batch(), shape.num_heads(), shape.k_len()));
    let per_state = size_of::<RowState>() / size_of::<f32>();
    let mut states = launcher.uninit::<f32>(&Shape::from(heads * state_chunks * MAX_LAST_QUERIES * per_state))?;
    let mut outputs = (0..N).map(|_| launcher.uninit::<f32>(&out_shape)).collect::<Result<Vec<_>, _>>()?;
    {
        let (q, k) = (last.storage_and_layout(), k.storage_and_layout());
        let (q, k) = (Operand::new(cuda_storage(&q.0)?, q.1)?, Operand::new(cuda_storage(&k.0)?, k.1)?);
        let ((q, _q), (k, _k)) = (q.view::<T>(stream)?, k.view::<T>(stream)?);
        let (states, _states) = states.device_ptr_mut(stream);
        let outputs: Vec<_> = outputs.iter_mut().map(|output| output.device_ptr_mut(stream)).collect();
        let output = |i: usize| outputs.get(i).map_or(ptr::null_mut(), |(address, _)| *address as *mut f32);
        // The kernels count a few tiles beyond the last key.
        check_i32("keys", shape.k_len() + 4 * TILE)?;
        let params = LastQueryParams {
            q: q.address as *const c_void,
            k: k.address as *const c_void,
            states: states as *mut RowState,
            by_key: output(0),
            by_distance: output(1),
            q_strides: q.strides,
            k_strides: k.strides,
            num_heads: to_i32("num_heads", shape.num_heads())?,
            num_kv_heads: to_i32("num_kv_heads", shape.num_kv_heads())?,
            rows: to_i32("queries", rows)?,
            k_len: to_i32("keys", shape.k_len())?,
            tiles_per_chunk: to_i32("key tiles", tiles_per_chunk)?,
            state_chunks: to_i32("key tiles", state_chunks)?,
            softmax_scale,
        };
        for (kernel, chunks) in [(Kernel::LastQueryStates, state_chunks), (Kernel::LastQueryScores, share_chunks)] {
            let function = Function::new(kernel, T::DTYPE, head_dim);
            // SAFETY: both kernels take these parameters; the views have the sizes of the shape, each chunk has a
            // state, and everything is held until the launches are enqueued.
            unsafe { launcher.launch(function, &params, Grid::Blocks([heads, chunks, 1])) }?;
        }
    }
    let mut outputs = outputs.into_iter().map(|slice| launcher.tensor(slice, out_shape.clone()));
    Ok(std::array::from_fn(|_| outputs.next().expect("as many outputs as scores")))
}
