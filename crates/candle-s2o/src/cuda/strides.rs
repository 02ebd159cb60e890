//! Launches of the kernels around the products of strides: their operands, and what blocks of them weigh.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{DType, Error, Shape, Storage, Tensor};
use half::{bf16, f16};
use s2o_core::BLOCK_Q;
use s2o_kernels::params::{StrideSharesParams, StridesParams};
use s2o_kernels::{Dtype, Function, Kernel, decoder};

use super::error::{CudaError, int};
use super::fused::{ANY_HEAD_DIM, Launcher, address, tensor};
use super::operand::{Element, Operand};
use super::rows::aligned;
use crate::error::AttnError;

/// Tokens and zeros that a block of threads copies.
const SLOTS: usize = 64;

/// The tokens of each stride behind each other, by head: `x` `(len, heads, head_dim)` with `before` rows of zeros before
/// it and `behind` behind it, in all a multiple of `stride`, becomes `(heads, strides, stride * head_dim)`; `backwards`
/// with the last token of each stride first. bf16 or f16 on a GPU, any strides in memory, head_dim a multiple of 8.
///
/// # Errors
/// If the tensor is not such, [`CudaError::Keys`] for its sizes, or the GPU fails.
pub fn token_strides(
    x: &Tensor,
    stride: usize,
    [before, behind]: [usize; 2],
    backwards: bool,
) -> Result<Tensor, AttnError> {
    let (len, _, head_dim) = x.dims3()?;
    let slots = before + len + behind;
    if stride == 0 || !slots.is_multiple_of(stride) {
        let expected = format!("a multiple of the stride {stride}");
        return Err(CudaError::Keys { name: "tokens", expected, got: slots }.into());
    }
    if !head_dim.is_multiple_of(decoder::VECTOR) {
        let expected = format!("a multiple of {}", decoder::VECTOR);
        return Err(CudaError::Keys { name: "head_dim", expected, got: head_dim }.into());
    }
    match x.dtype() {
        DType::BF16 => cut::<bf16>(x, stride, [before, slots], backwards),
        DType::F16 => cut::<f16>(x, stride, [before, slots], backwards),
        got => Err(CudaError::DType { name: "x", got }.into()),
    }
}

fn cut<T: Element>(
    x: &Tensor,
    stride: usize,
    [before, slots]: [usize; 2],
    backwards: bool,
) -> Result<Tensor, AttnError> {
    let (len, heads, head_dim) = x.dims3()?;
    let launcher = Launcher::of(x)?;
    let stream = &launcher.stream;
    let shape = Shape::from((heads, slots / stride, stride * head_dim));
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let x = x.unsqueeze(0)?;
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return Err(AttnError::GpuOnly { what: "cutting strides" }) };
        let operand = Operand::new(storage, layout)?;
        let (x, _x) = operand.view::<T>(stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        int("elements of a few tokens", 2 * SLOTS * head_dim)?;
        int("tokens", slots + SLOTS.max(stride))?;
        let params = StridesParams {
            x: x.address as *const c_void,
            out: out as *mut c_void,
            seq_stride: x.strides.seq,
            head_stride: x.strides.head,
            num_heads: int("heads", heads)?,
            len: int("tokens", len)?,
            slots: int("tokens", slots)?,
            before: int("tokens", before)?,
            stride: if backwards { int("stride", stride)? } else { 0 },
            head_dim: int("head_dim", head_dim)?,
        };
        let function = Function::new(Kernel::Strides, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: a block for each few slots of each head; both tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, [heads, slots.div_ceil(SLOTS), 1], None) }?;
    }
    Ok(tensor(out, &launcher.device, shape))
}

/// What blocks of key strides weigh for blocks of query strides: for each row of `products` `(heads, rows, columns)`, bf16
/// or f16 on a GPU, the softmax of `scale` times its first `limits[row]` entries, of a row without any zeros, and of these
/// the sums over `per_block` rows and `per_block` columns: `(heads, rows / per_block, key_blocks)` of f32, zeros beyond
/// the columns. `limits` is `(rows)` of u32; `per_block` is a power of two up to 128 that divides rows and columns.
///
/// # Errors
/// If the tensors are not such, [`CudaError::Keys`] for their sizes, or the GPU fails.
pub fn stride_shares(
    products: &Tensor,
    limits: &Tensor,
    per_block: usize,
    key_blocks: usize,
    scale: f32,
) -> Result<Tensor, AttnError> {
    let (_, rows, columns) = products.dims3()?;
    if limits.dims() != [rows] {
        let (lhs, rhs) = (products.shape().clone(), limits.shape().clone());
        return Err(Error::ShapeMismatchBinaryOp { lhs, rhs, op: "stride-shares" }.bt().into());
    }
    if !products.device().same_device(limits.device()) {
        let (lhs, rhs) = (products.device().location(), limits.device().location());
        return Err(Error::DeviceMismatchBinaryOp { lhs, rhs, op: "stride-shares" }.bt().into());
    }
    if limits.dtype() != DType::U32 {
        let (msg, got) = ("limits of stride_shares", limits.dtype());
        return Err(Error::UnexpectedDType { msg, expected: DType::U32, got }.bt().into());
    }
    if !per_block.is_power_of_two() || per_block > BLOCK_Q {
        let expected = format!("a power of two up to {BLOCK_Q}");
        return Err(CudaError::Keys { name: "strides of a block", expected, got: per_block }.into());
    }
    for (name, got) in [("rows", rows), ("columns", columns)] {
        if !got.is_multiple_of(per_block) {
            let expected = format!("a multiple of {per_block}");
            return Err(CudaError::Keys { name, expected, got }.into());
        }
    }
    if key_blocks * per_block < columns {
        let expected = format!("at least {}", columns / per_block);
        return Err(CudaError::Keys { name: "key blocks", expected, got: key_blocks }.into());
    }
    let products = aligned(products, products, products.dtype())?;
    let limits = aligned(limits, limits, DType::U32)?;
    match products.dtype() {
        DType::BF16 => share::<bf16>(&products, &limits, per_block, key_blocks, scale),
        DType::F16 => share::<f16>(&products, &limits, per_block, key_blocks, scale),
        got => Err(CudaError::DType { name: "products", got }.into()),
    }
}

fn share<T: Element>(
    products: &Tensor,
    limits: &Tensor,
    per_block: usize,
    key_blocks: usize,
    scale: f32,
) -> Result<Tensor, AttnError> {
    let (heads, rows, columns) = products.dims3()?;
    let launcher = Launcher::of(products)?;
    let stream = &launcher.stream;
    let shape = Shape::from((heads, rows / per_block, key_blocks));
    let mut out = launcher.uninit::<f32>(&shape)?;
    {
        let (products, limits) = (products.storage_and_layout(), limits.storage_and_layout());
        let (products, _products) = address::<T>(&products.0, products.1, stream)?;
        let (limits, _limits) = address::<u32>(&limits.0, limits.1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        // The kernel counts a step beyond the last column, and blocks in entries.
        int("columns", (key_blocks + 256) * per_block)?;
        let params = StrideSharesParams {
            products: products as *const c_void,
            limits: limits as *const u32,
            out: out as *mut f32,
            rows: int("rows", rows)?,
            columns: int("columns", columns)?,
            per_block: int("strides of a block", per_block)?,
            key_blocks: int("key blocks", key_blocks)?,
            scale,
        };
        let function = Function::new(Kernel::StrideShares, T::DTYPE, ANY_HEAD_DIM);
        // SAFETY: a block for each entry of (rows / per_block, heads); all tensors are contiguous, of the sizes given, and
        // held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, [rows / per_block, heads, 1], None) }?;
    }
    Ok(tensor(out, &launcher.device, shape))
}
