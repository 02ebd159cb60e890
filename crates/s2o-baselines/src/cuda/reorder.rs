//! Copies of keys and values in another order: the launch of the `reorder` kernel.

use std::ffi::c_void;

use candle_core::{DType, Error, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, Operand, address, check_i32, cuda_storage, to_i32};
use s2o_kernels::params::ReorderParams;
use s2o_kernels::{Dtype, Function, Kernel};

use super::{aligned, check_vectors, same_device, shape_mismatch};

/// Output rows per thread block.
const ROWS: usize = 8;

/// Copies keys and values in the order of `positions`, followed by all of them in their original order. Each result is
/// `(batch, before + k_len, heads, head_dim)`, contiguous.
///
/// - `k`, `v`: `(batch, k_len, num_kv_heads, head_dim)`, bf16 or f16 on one GPU, any strides, head_dim a multiple of 8.
/// - `positions`: `(batch, heads, before)` of u32. Every `heads / num_kv_heads` consecutive heads read one KV head. A
///   position beyond the keys selects the last key.
///
/// # Errors
/// If a shape, dtype or device does not fit, or the GPU fails.
pub fn reorder_keys(k: &Tensor, v: &Tensor, positions: &Tensor) -> Result<[Tensor; 2], CudaError> {
    let (batch, k_len, kv_heads, head_dim) = k.dims4()?;
    let (order_batch, heads, _) = positions.dims3()?;
    for (lhs, rhs, fit) in [
        (k, v, k.dims() == v.dims()),
        (k, positions, order_batch == batch && kv_heads > 0 && heads.is_multiple_of(kv_heads) && k_len > 0),
    ] {
        if !fit {
            return Err(shape_mismatch(lhs, rhs, "reorder-keys"));
        }
        same_device(lhs, rhs)?;
    }
    check_vectors(head_dim)?;
    if v.dtype() != k.dtype() {
        let (lhs, rhs) = (k.dtype(), v.dtype());
        return Err(Error::DTypeMismatchBinaryOp { lhs, rhs, op: "reorder-keys" }.bt().into());
    }
    let positions = aligned(positions, k, DType::U32)?;
    match k.dtype() {
        DType::BF16 => typed::<bf16>(k, v, &positions),
        DType::F16 => typed::<f16>(k, v, &positions),
        got => Err(CudaError::DType { name: "k", got }),
    }
}

fn typed<T: Element>(k: &Tensor, v: &Tensor, positions: &Tensor) -> Result<[Tensor; 2], CudaError> {
    let (batch, k_len, kv_heads, head_dim) = k.dims4()?;
    let (_, heads, before) = positions.dims3()?;
    let launcher = Launcher::of(k)?;
    let stream = launcher.stream();
    let out_len = before + k_len;
    let shape = Shape::from((batch, out_len, heads, head_dim));
    let mut k_out = launcher.uninit::<T>(&shape)?;
    let mut v_out = launcher.uninit::<T>(&shape)?;
    {
        let (k, v) = (k.storage_and_layout(), v.storage_and_layout());
        let positions = positions.storage_and_layout();
        let (k, v) = (Operand::new(cuda_storage(&k.0)?, k.1)?, Operand::new(cuda_storage(&v.0)?, v.1)?);
        let ((k, _k), (v, _v)) = (k.view::<T>(stream)?, v.view::<T>(stream)?);
        let (positions, _positions) = address::<u32>(&positions.0, positions.1, stream)?;
        let (k_out, _k_out) = k_out.device_ptr_mut(stream);
        let (v_out, _v_out) = v_out.device_ptr_mut(stream);
        check_i32("rows", out_len + ROWS)?;
        check_i32("elements of a few rows", (ROWS + 1) * heads * head_dim)?;
        let params = ReorderParams {
            k: k.address as *const c_void,
            v: v.address as *const c_void,
            positions: positions as *const u32,
            k_out: k_out as *mut c_void,
            v_out: v_out as *mut c_void,
            k_strides: k.strides,
            v_strides: v.strides,
            num_heads: to_i32("heads", heads)?,
            num_kv_heads: to_i32("num_kv_heads", kv_heads)?,
            before: to_i32("reordered keys", before)?,
            k_len: to_i32("keys", k_len)?,
            head_dim: to_i32("head_dim", head_dim)?,
        };
        let function = Function::new(Kernel::Reorder, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: the grid covers all output rows, no key beyond k_len is read, and all is held until the enqueue.
        unsafe { launcher.launch(function, &params, Grid::Blocks([out_len.div_ceil(ROWS), batch, 1])) }?;
    }
    Ok([k_out, v_out].map(|slice| launcher.tensor(slice, shape.clone())))
}
