//! Kernels of the antidiagonal scores: one makes the operands of the stride products, one sums their softmax by blocks.

use std::ffi::c_void;

use candle_core::{DType, Shape, Tensor};
use candle_s2o::BLOCK_Q;
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, Operand, address, check_i32, cuda_storage, to_i32};
use s2o_kernels::params::{StrideSharesParams, StridesParams};
use s2o_kernels::{Dtype, Function, Kernel};

use super::{aligned, check_size, check_vectors, shape_mismatch};
use crate::antidiagonal::StrideOrder;

/// Tokens, including padding zeros, that one thread block copies.
const SLOTS: usize = 64;

/// Pads `x` with `before` zero tokens in front and `after` at the end, and joins the tokens of each stride of `stride`
/// tokens in `order`: `(heads, strides, stride * head_dim)`. The padded length must be a multiple of `stride`. `x` is
/// `(len, heads, head_dim)`, bf16 or f16 on a GPU, any strides in memory, head_dim a multiple of 8.
///
/// # Errors
/// [`CudaError::Size`] or [`CudaError::DType`] if the tensor does not fit; or if the GPU fails.
pub fn token_strides(
    x: &Tensor,
    stride: usize,
    [before, after]: [usize; 2],
    order: StrideOrder,
) -> Result<Tensor, CudaError> {
    let (len, _, head_dim) = x.dims3()?;
    let slots = before + len + after;
    let fits = stride > 0 && slots.is_multiple_of(stride);
    check_size(fits, "tokens", format_args!("a multiple of the stride {stride}"), slots)?;
    check_vectors(head_dim)?;
    match x.dtype() {
        DType::BF16 => cut::<bf16>(x, stride, [before, slots], order),
        DType::F16 => cut::<f16>(x, stride, [before, slots], order),
        got => Err(CudaError::DType { name: "x", got }),
    }
}

fn cut<T: Element>(
    x: &Tensor,
    stride: usize,
    [before, slots]: [usize; 2],
    order: StrideOrder,
) -> Result<Tensor, CudaError> {
    let (len, heads, head_dim) = x.dims3()?;
    let launcher = Launcher::of(x)?;
    let stream = launcher.stream();
    let shape = Shape::from((heads, slots / stride, stride * head_dim));
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let x = x.unsqueeze(0)?;
        let (storage, layout) = x.storage_and_layout();
        let operand = Operand::new(cuda_storage(&storage)?, layout)?;
        let (x, _x) = operand.view::<T>(stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        check_i32("elements of a few tokens", 2 * SLOTS * head_dim)?;
        check_i32("tokens", slots + SLOTS.max(stride))?;
        let params = StridesParams {
            x: x.address as *const c_void,
            out: out as *mut c_void,
            seq_stride: x.strides.seq,
            head_stride: x.strides.head,
            num_heads: to_i32("heads", heads)?,
            len: to_i32("tokens", len)?,
            slots: to_i32("tokens", slots)?,
            before: to_i32("tokens", before)?,
            stride: if order == StrideOrder::Backward { to_i32("stride", stride)? } else { 0 },
            head_dim: to_i32("head_dim", head_dim)?,
        };
        let function = Function::new(Kernel::Strides, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: the grid covers all slots of all heads; both tensors are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([heads, slots.div_ceil(SLOTS), 1])) }?;
    }
    Ok(launcher.tensor(out, shape))
}

/// Softmax mass of each block of key strides in each block of query strides: `(heads, rows / per_block, key_blocks)` of
/// f32. Computes, for each row of `products`, the softmax of `scale` times its first `limits[row]` entries (zeros if
/// the limit is 0), and sums it over blocks of `per_block` rows and columns. Key blocks beyond the columns are 0.
///
/// - `products`: `(heads, rows, columns)`, bf16 or f16 on a GPU.
/// - `limits`: `(rows)` of u32.
/// - `per_block`: a power of two up to 128 that divides rows and columns.
///
/// # Errors
/// If a shape, dtype or device does not fit, [`CudaError::Size`] for other sizes, or the GPU fails.
pub fn stride_shares(
    products: &Tensor,
    limits: &Tensor,
    per_block: usize,
    key_blocks: usize,
    scale: f32,
) -> Result<Tensor, CudaError> {
    let (_, rows, columns) = products.dims3()?;
    if limits.dims() != [rows] {
        return Err(shape_mismatch(products, limits, "stride-shares"));
    }
    let limits = aligned(limits, products, DType::U32)?;
    let fits = per_block.is_power_of_two() && per_block <= BLOCK_Q;
    check_size(fits, "strides of a block", format_args!("a power of two up to {BLOCK_Q}"), per_block)?;
    for (name, got) in [("rows", rows), ("columns", columns)] {
        check_size(got.is_multiple_of(per_block), name, format_args!("a multiple of {per_block}"), got)?;
    }
    let fits = key_blocks * per_block >= columns;
    check_size(fits, "key blocks", format_args!("at least {}", columns / per_block), key_blocks)?;
    let products = aligned(products, products, products.dtype())?;
    match products.dtype() {
        DType::BF16 => share::<bf16>(&products, &limits, per_block, key_blocks, scale),
        DType::F16 => share::<f16>(&products, &limits, per_block, key_blocks, scale),
        got => Err(CudaError::DType { name: "products", got }),
    }
}

fn share<T: Element>(
    products: &Tensor,
    limits: &Tensor,
    per_block: usize,
    key_blocks: usize,
    scale: f32,
) -> Result<Tensor, CudaError> {
    let (heads, rows, columns) = products.dims3()?;
    let launcher = Launcher::of(products)?;
    let stream = launcher.stream();
    let shape = Shape::from((heads, rows / per_block, key_blocks));
    let mut out = launcher.uninit::<f32>(&shape)?;
    {
        let (products, limits) = (products.storage_and_layout(), limits.storage_and_layout());
        let (products, _products) = address::<T>(&products.0, products.1, stream)?;
        let (limits, _limits) = address::<u32>(&limits.0, limits.1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        // The kernel counts one step beyond the last column, and key blocks in entries.
        check_i32("columns", (key_blocks + 256) * per_block)?;
        let params = StrideSharesParams {
            products: products as *const c_void,
            limits: limits as *const u32,
            out: out as *mut f32,
            rows: to_i32("rows", rows)?,
            columns: to_i32("columns", columns)?,
            per_block: to_i32("strides of a block", per_block)?,
            key_blocks: to_i32("key blocks", key_blocks)?,
            scale,
        };
        let function = Function::new(Kernel::StrideShares, T::DTYPE, ANY_HEAD_DIM);
        // SAFETY: one thread block per entry of (rows / per_block, heads); all tensors are contiguous, have the given
        // sizes, and are held until the launch is enqueued.
        unsafe { launcher.launch(function, &params, Grid::Blocks([rows / per_block, heads, 1])) }?;
    }
    Ok(launcher.tensor(out, shape))
}
