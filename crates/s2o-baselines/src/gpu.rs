//! What the kernels of a GPU do for the methods here. Each function gives nothing where they do not know the tensors, which
//! are then left to Candle's operations.

use candle_core::{DType, Tensor};
use candle_s2o::cuda;

use crate::error::BaselineError;

/// Whether these are elements that the kernels know.
fn knows(x: &Tensor) -> bool {
    x.device().is_cuda() && matches!(x.dtype(), DType::BF16 | DType::F16)
}

/// Whether heads, the last dimension, are whole pieces of 16 bytes.
fn copies_heads(x: &Tensor) -> bool {
    knows(x) && x.dims().last().is_some_and(|dim| dim.is_multiple_of(8))
}

/// Whether the kernels multiply these: they know the same heads as those that pool.
fn multiplies(q: &Tensor, k: &Tensor, count: usize) -> bool {
    cuda::pools(q) && cuda::pools(k) && q.dtype() == k.dtype() && (1..=cuda::MOST_LAST_QUERIES).contains(&count)
}

/// [`cuda::attention_by_key`]
pub(crate) fn attention_by_key(
    q: &Tensor,
    k: &Tensor,
    scale: f32,
    count: usize,
) -> Result<Option<Tensor>, BaselineError> {
    Ok(multiplies(q, k, count).then(|| cuda::attention_by_key(q, k, scale, count)).transpose()?)
}

/// [`cuda::attention_by_key_and_distance`]
pub(crate) fn attention_by_key_and_distance(
    q: &Tensor,
    k: &Tensor,
    scale: f32,
    count: usize,
) -> Result<Option<[Tensor; 2]>, BaselineError> {
    Ok(multiplies(q, k, count).then(|| cuda::attention_by_key_and_distance(q, k, scale, count)).transpose()?)
}

/// [`cuda::reorder_keys`]
pub(crate) fn reorder_keys(k: &Tensor, v: &Tensor, positions: &Tensor) -> Result<Option<[Tensor; 2]>, BaselineError> {
    let known = copies_heads(k) && k.dtype() == v.dtype();
    Ok(known.then(|| cuda::reorder_keys(k, v, positions)).transpose()?)
}

/// [`cuda::token_strides`]
pub(crate) fn token_strides(
    x: &Tensor,
    stride: usize,
    missing: [usize; 2],
    backwards: bool,
) -> Result<Option<Tensor>, BaselineError> {
    Ok(copies_heads(x).then(|| cuda::token_strides(x, stride, missing, backwards)).transpose()?)
}

/// [`cuda::stride_shares`]
pub(crate) fn stride_shares(
    products: &Tensor,
    limits: &Tensor,
    per_block: usize,
    key_blocks: usize,
    scale: f32,
) -> Result<Option<Tensor>, BaselineError> {
    Ok(knows(products).then(|| cuda::stride_shares(products, limits, per_block, key_blocks, scale)).transpose()?)
}
