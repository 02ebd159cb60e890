//! Means and self-similarity of blocks of tokens: the launch of the `block_pool` kernel.

use std::ffi::c_void;
use std::ptr;

use candle_core::{DType, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, address, cuda_storage, to_i32};
use s2o_kernels::params::BlockPoolParams;
use s2o_kernels::{Function, Kernel};

use super::{aligned, check_size, shape_mismatch};

/// Mean token of each block of `block` tokens, `(batch, heads, blocks, head_dim)` of f32. If `self_similarity` is true,
/// also the mean cosine over all pairs of tokens of a block, each token with itself included: `(batch, heads, blocks)`
/// of f32. Reads every token once, in place if heads are contiguous and start at multiples of 16 bytes.
///
/// - `x`: `(batch, len, heads, head_dim)`, bf16 or f16 on a GPU, head_dim 64 or 128.
/// - `offset`: position of the first token. Blocks start at positions that are multiples of `block`, so the first and
///   last block may be ragged; their mean is over the tokens present.
/// - `centre`: `(batch, heads, head_dim)` of f32, subtracted from every token first.
///
/// # Errors
/// If a shape, dtype or device does not fit, `x` has no tokens, `block` is 0, or the GPU fails.
pub fn block_pool(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
    self_similarity: bool,
) -> Result<(Tensor, Option<Tensor>), CudaError> {
    match x.dtype() {
        DType::BF16 => typed::<bf16>(x, offset, block, centre, self_similarity),
        DType::F16 => typed::<f16>(x, offset, block, centre, self_similarity),
        got => Err(CudaError::DType { name: "x", got }),
    }
}

fn typed<T: Element>(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
    self_similarity: bool,
) -> Result<(Tensor, Option<Tensor>), CudaError> {
    let (batch, len, heads, head_dim) = x.dims4()?;
    let size = s2o_cuda::head_dim(Kernel::BlockPool, head_dim)?;
    check_size(len > 0 && block > 0, "block_pool", "at least 1 token, in all and in a block", 0)?;
    let centre = centre.map(|centre| aligned(centre, x, DType::F32)).transpose()?;
    if let Some(centre) = centre.as_ref().filter(|centre| centre.dims() != [batch, heads, head_dim]) {
        return Err(shape_mismatch(x, centre, "block-pool"));
    }
    let end = offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok());
    let Some(end) = end else {
        let (name, expected) = ("position of the last token", format!("below {}", i64::MAX));
        return Err(CudaError::Size { name, expected, got: offset });
    };
    // Any size from `end` on gives a single block.
    let block = block.min(end);
    let blocks = end.div_ceil(block) - offset / block;
    let launcher = Launcher::of(x)?;
    let stream = launcher.stream();
    let shapes = [Shape::from((batch, heads, blocks, head_dim)), Shape::from((batch, heads, blocks))];
    let mut means = launcher.uninit::<f32>(&shapes[0])?;
    let mut similarity = self_similarity.then(|| launcher.uninit::<f32>(&shapes[1])).transpose()?;
    {
        let (storage, layout) = x.storage_and_layout();
        let operand = Operand::new(cuda_storage(&storage)?, layout)?;
        let (view, _x) = operand.view::<T>(stream)?;
        let centre = centre.as_ref().map(Tensor::storage_and_layout);
        let centre = centre.as_ref().map(|centre| address::<f32>(&centre.0, centre.1, stream)).transpose()?;
        let (means, _means) = means.device_ptr_mut(stream);
        let similarity = similarity.as_mut().map(|similarity| similarity.device_ptr_mut(stream));
        let params = BlockPoolParams {
            x: view.address as *const c_void,
            centre: centre.as_ref().map_or(ptr::null(), |(centre, _)| *centre as *const f32),
            means: means as *mut f32,
            self_similarity: similarity.as_ref().map_or(ptr::null_mut(), |(similarity, _)| *similarity as *mut f32),
            strides: view.strides,
            offset: offset as i64,
            len: len as i64,
            block: block as i64,
            heads: to_i32("heads", heads)?,
            blocks: to_i32("blocks", blocks)?,
        };
        let function = Function::new(Kernel::BlockPool, T::DTYPE, size);
        // SAFETY: one thread block per block of tokens and head; all tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([batch * heads * blocks, 1, 1])) }?;
    }
    let [of_means, of_similarity] = shapes;
    let similarity = similarity.map(|similarity| launcher.tensor(similarity, of_similarity));
    Ok((launcher.tensor(means, of_means), similarity))
}
