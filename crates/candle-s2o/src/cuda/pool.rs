//! Launch of the kernel that pools blocks of tokens.

use std::ffi::c_void;
use std::ptr;

use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{DType, Shape, Storage, Tensor};
use half::{bf16, f16};
use s2o_kernels::params::BlockPoolParams;
use s2o_kernels::{Function, HeadDim, Kernel};

use super::error::{CudaError, int};
use super::fused::{Launcher, address, knows, tensor};
use super::operand::{Element, Operand};
use super::rows::aligned;
use crate::error::AttnError;

/// Blocks of tokens stood for by one vector each.
#[derive(Debug, Clone)]
pub struct PooledBlocks {
    /// Their means: `(batch, heads, blocks, head_dim)` of f32.
    pub means: Tensor,
    /// How alike their tokens are, the mean cosine of all pairs, each token with itself included: `(batch, heads, blocks)`
    /// of f32.
    pub alike: Option<Tensor>,
}

/// Whether [`block_pool`] knows tensors like this one: bf16 or f16 on a GPU, heads of 64 or 128.
pub fn pools(x: &Tensor) -> bool {
    let head_dim = x.dims4().ok().and_then(|(_, _, _, head_dim)| HeadDim::new(head_dim));
    knows(x.device(), x.dtype()) && head_dim.is_some() && x.elem_count() > 0
}

/// Means over blocks of `block` tokens, cut at multiples of the absolute position: `x` `(batch, len, heads, head_dim)` of
/// bf16 or f16 on a GPU, its first token at position `offset`. Ragged blocks are means of the tokens that they have.
/// `alike` asks how alike the tokens of each block are. `centre`, `(batch, heads, head_dim)` of f32, is taken off every
/// token first, for the means too. Every token is read once, in place where heads are contiguous and begin at multiples
/// of 16 bytes.
///
/// # Errors
/// If the tensors are not such, see [`pools`], `block` is 0, or the GPU fails.
pub fn block_pool(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
    alike: bool,
) -> Result<PooledBlocks, AttnError> {
    match x.dtype() {
        DType::BF16 => pool::<bf16>(x, offset, block, centre, alike),
        DType::F16 => pool::<f16>(x, offset, block, centre, alike),
        got => Err(CudaError::DType { name: "x", got }.into()),
    }
}

fn pool<T: Element>(
    x: &Tensor,
    offset: usize,
    block: usize,
    centre: Option<&Tensor>,
    alike: bool,
) -> Result<PooledBlocks, AttnError> {
    let (batch, len, heads, head_dim) = x.dims4()?;
    let size = HeadDim::new(head_dim).ok_or(CudaError::HeadDim { got: head_dim })?;
    if len == 0 || block == 0 {
        let (name, expected) = ("block_pool", "at least 1 token, in all and in a block".to_owned());
        return Err(CudaError::Keys { name, expected, got: 0 }.into());
    }
    let centre = centre.map(|centre| aligned(centre, x, DType::F32)).transpose()?;
    if let Some(centre) = centre.as_ref().filter(|centre| centre.dims() != [batch, heads, head_dim]) {
        let (lhs, rhs) = (x.shape().clone(), centre.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: "block-pool" }.bt().into());
    }
    let end = offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok());
    let Some(end) = end else {
        let (name, expected) = ("position of the last token", format!("below {}", i64::MAX));
        return Err(CudaError::Keys { name, expected, got: offset }.into());
    };
    // Larger ones cut nothing more.
    let block = block.min(end);
    let blocks = end.div_ceil(block) - offset / block;
    let launcher = Launcher::of(x)?;
    let stream = &launcher.stream;
    let shapes = [Shape::from((batch, heads, blocks, head_dim)), Shape::from((batch, heads, blocks))];
    let mut means = launcher.uninit::<f32>(&shapes[0])?;
    let mut similarity = alike.then(|| launcher.uninit::<f32>(&shapes[1])).transpose()?;
    {
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(candle_core::Error::Msg("expected tokens on a GPU".to_owned()).bt().into());
        };
        let operand = Operand::new(storage, layout)?;
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
            heads: int("heads", heads)?,
            blocks: int("blocks", blocks)?,
        };
        let function = Function::new(Kernel::BlockPool, T::DTYPE, size);
        // SAFETY: a block for each block of tokens of each head; all tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, [batch * heads * blocks, 1, 1], None) }?;
    }
    let [of_means, of_alike] = shapes;
    Ok(PooledBlocks {
        means: tensor(means, &launcher.device, of_means),
        alike: similarity.map(|similarity| tensor(similarity, &launcher.device, of_alike)),
    })
}
