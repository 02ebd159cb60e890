//! Heads in another size on a GPU.

use std::ffi::c_void;

use candle_core::{DType, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, Operand, check_i32, cuda_storage, to_i32};
use s2o_kernels::params::ResizeHeadsParams;
use s2o_kernels::{Dtype, Function, Kernel};

use crate::error::FlashAttnError;
use crate::kernel::cuda;

/// Rows that a thread block copies.
const ROWS: usize = 8;

/// A contiguous copy of `x` (batch, length, heads, head_dim) with heads of `head_dim` columns: the first ones, or all and
/// zeros after them. Both sizes are multiples of 8.
pub(crate) fn resized(x: &Tensor, head_dim: usize) -> Result<Tensor, FlashAttnError> {
    match x.dtype() {
        DType::BF16 => typed::<bf16>(x, head_dim).map_err(cuda),
        DType::F16 => typed::<f16>(x, head_dim).map_err(cuda),
        got => Err(cuda(CudaError::DType { name: "q", got })),
    }
}

fn typed<T: Element>(x: &Tensor, to: usize) -> Result<Tensor, CudaError> {
    let (batch, len, num_heads, from) = x.dims4()?;
    let launcher = Launcher::of(x)?;
    let stream = launcher.stream();
    let shape = Shape::from((batch, len, num_heads, to));
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let held = x.storage_and_layout();
        let x = Operand::new(cuda_storage(&held.0)?, held.1)?;
        let (x, _x) = x.view::<T>(stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        let rows = batch * len;
        check_i32("rows", rows + ROWS)?;
        check_i32("elements of a few rows", (ROWS + 1) * num_heads * to.max(from))?;
        let params = ResizeHeadsParams {
            x: x.address as *const c_void,
            out: out as *mut c_void,
            x_strides: x.strides,
            rows: to_i32("rows", rows)?,
            len: to_i32("length", len)?,
            num_heads: to_i32("heads", num_heads)?,
            from: to_i32("head_dim", from)?,
            to: to_i32("head_dim", to)?,
        };
        let function = Function::new(Kernel::ResizeHeads, Dtype::Bf16, ANY_HEAD_DIM);
        // SAFETY: the grid covers all rows of the output, and both tensors are held until the enqueue.
        unsafe { launcher.launch(function, &params, Grid::Blocks([rows.div_ceil(ROWS), 1, 1])) }?;
    }
    Ok(launcher.tensor(out, shape))
}
