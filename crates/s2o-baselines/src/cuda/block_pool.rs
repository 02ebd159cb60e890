//! Launch of the kernel that pools blocks of tokens.

use std::ffi::c_void;
use std::ptr;

use candle_core::{DType, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, address, cuda_storage, to_i32};
use s2o_kernels::params::BlockPoolParams;
use s2o_kernels::{Function, HeadDim, Kernel};

use super::{aligned, shape_mismatch};

/// Blocks of tokens, each represented by one vector.
#[derive(Debug, Clone)]
pub struct PooledBlocks {
    /// Their means: `(batch, heads, blocks, head_dim)` of f32.
    pub means: Tensor,
    /// Their self-similarity, the mean cosine of all pairs of tokens, each with itself included: `(batch, heads,
    /// blocks)` of f32.
    pub self_similarity: Option<Tensor>,
}

/// Means over blocks of `block` tokens, cut at multiples of the absolute position: `x` `(batch, len, heads, head_dim)`
/// of bf16 or f16 on a GPU, its first token at position `offset`. Ragged blocks are means of the tokens that they have.
/// `self_similarity` asks for that of each block. `centre`, `(batch, heads, head_dim)` of f32, is taken off every token
/// first, for the means too. Every token is read once, in place where heads are contiguous and begin at multiples of 16
/// bytes.
///
/// # Errors
/// If the tensors are not such, `block` is 0, or the GPU fails.
pub fn block_pool(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
    self_similarity: bool,
) -> Result<PooledBlocks, CudaError> {
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
) -> Result<PooledBlocks, CudaError> {
    let (batch, len, heads, head_dim) = x.dims4()?;
    let size = HeadDim::new(head_dim).ok_or(CudaError::HeadDim { got: head_dim })?;
    if len == 0 || block == 0 {
        let (name, expected) = ("block_pool", "at least 1 token, in all and in a block".to_owned());
        return Err(CudaError::Size { name, expected, got: 0 });
    }
    let centre = centre.map(|centre| aligned(centre, x, DType::F32)).transpose()?;
    if let Some(centre) = centre.as_ref().filter(|centre| centre.dims() != [batch, heads, head_dim]) {
        return Err(shape_mismatch(x, centre, "block-pool"));
    }
    let end = offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok());
    let Some(end) = end else {
        let (name, expected) = ("position of the last token", format!("below {}", i64::MAX));
        return Err(CudaError::Size { name, expected, got: offset });
    };
    // Larger ones cut nothing more.
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
        // SAFETY: a block for each block of tokens of each head; all tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([batch * heads * blocks, 1, 1])) }?;
    }
    let [of_means, of_similarity] = shapes;
    Ok(PooledBlocks {
        means: launcher.tensor(means, of_means),
        self_similarity: similarity.map(|similarity| launcher.tensor(similarity, of_similarity)),
    })
}
