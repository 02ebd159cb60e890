//! Matrix products of many rows in 16 bits: the gated one of `cuda/sm90/linear.cuh`, and sums in place by cuBLAS.

use std::ffi::c_void;
use std::ptr;

use candle_core::{DType, Error, Tensor};
use cudarc::cublas::result::gemm_ex;
use cudarc::cublas::sys as cublas;
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, View, address, to_i32, unaligned_address};
use s2o_kernels::params::{LinearParams, Strides};
use s2o_kernels::{Function, Kernel, decoder};

use super::supports;
use super::written::{with_width, written_from};

type Result<T> = std::result::Result<T, CudaError>;

/// Fewer rows do not fill a tile, and cuBLAS has kernels for them.
const FEWEST_ROWS: usize = decoder::LINEAR_TILE[0];
/// Rows of matrices begin at multiples of 16 bytes.
const MULTIPLE: usize = 8;

/// Whether the kernel of [`gated`] takes these stacked weights `(2 size_out, size_in)`.
pub(super) fn takes(weight: &Tensor) -> bool {
    let fits = match weight.dims() {
        &[rows, size_in] => size_in > 0 && size_in.is_multiple_of(MULTIPLE) && rows.is_multiple_of(2 * MULTIPLE),
        _ => false,
    };
    let is_16_bit = matches!(weight.dtype(), DType::BF16 | DType::F16);
    let has_kernel = || {
        let launcher = weight.device().as_cuda_device().map_err(CudaError::from).and_then(Launcher::new);
        launcher.is_ok_and(|launcher| launcher.has(Kernel::GatedLinear))
    };
    fits && is_16_bit && weight.is_contiguous() && has_kernel()
}

/// `silu(x gate^T) * (x up^T)` for `x` `(.., size_in)` and the stacked weights `(2 size_out, size_in)`, in bf16 or f16.
/// `None` if the kernel is not for this GPU, these sizes or this number of rows.
pub(super) fn gated(x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
    let (weight_rows, size_in) = weight.dims2()?;
    // First, because every decoded token comes here.
    if x.elem_count() < FEWEST_ROWS * size_in.max(1) {
        return Ok(None);
    }
    let is_of_one_kind = x.dtype() == weight.dtype() && x.device().same_device(weight.device());
    let is_aligned = !x.is_contiguous() || x.layout().start_offset().is_multiple_of(MULTIPLE);
    if !is_of_one_kind || !is_aligned || x.dims().last() != Some(&size_in) || !takes(weight) {
        return Ok(None);
    }
    let rows = x.elem_count() / size_in;
    let launcher = Launcher::of(x)?;
    let product = match x.dtype() {
        DType::BF16 => gated_in::<bf16>,
        _ => gated_in::<f16>,
    };
    product(&launcher, &x.contiguous()?, weight, [rows, size_in, weight_rows]).map(Some)
}

fn gated_in<T: Element>(
    launcher: &Launcher,
    x: &Tensor,
    weight: &Tensor,
    [rows, size_in, weight_rows]: [usize; 3],
) -> Result<Tensor> {
    let stream = launcher.stream();
    let shape = with_width(x.dims(), weight_rows / 2);
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let tensors = [x, weight].map(Tensor::storage_and_layout);
        let (x, _x) = address::<T>(&tensors[0].0, tensors[0].1, stream)?;
        let (weight, _weight) = address::<T>(&tensors[1].0, tensors[1].1, stream)?;
        let (out, _out) = out.device_ptr_mut(stream);
        let params = LinearParams {
            x: x as *const c_void,
            weight: weight as *const c_void,
            x_scales: ptr::null(),
            weight_scales: ptr::null(),
            out: out as *mut c_void,
            rows: to_i32("rows", rows)?,
            width_in: to_i32("size_in", size_in)?,
            weight_rows: to_i32("rows of the weight", weight_rows)?,
            is_gated: true.into(),
            adds: false.into(),
        };
        // SAFETY: the matrices are contiguous and have these sizes; all tensors are held until the launch is enqueued.
        unsafe { enqueue::<T>(launcher, Kernel::GatedLinear, size_in, &params) }?;
    }
    Ok(launcher.tensor(out, shape))
}

/// Whether [`add`] takes a weight, and a contiguous sum of many rows.
pub(super) fn adds(weight: &Tensor, sum: &Tensor) -> bool {
    let is_of_one_kind = sum.dtype() == weight.dtype() && sum.device().same_device(weight.device());
    let many = sum.elem_count() >= FEWEST_ROWS * sum.dims().last().copied().unwrap_or_default();
    is_of_one_kind && many && supports(weight.device(), weight.dtype()) && weight.is_contiguous()
}

/// Adds `x weight^T` to `sum` `(.., size_out)` in place, for `x` `(.., size_in)` and `weight` `(size_out, size_in)`, all
/// contiguous, in bf16 or f16: by cuBLAS, whose kernels round the product before they add it, or the sum alone. The caller
/// checks shapes, dtypes and devices.
pub(super) fn add(x: &Tensor, weight: &Tensor, sum: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::BF16 => add_in::<bf16>(x, weight, sum, cublas::cudaDataType::CUDA_R_16BF),
        _ => add_in::<f16>(x, weight, sum, cublas::cudaDataType::CUDA_R_16F),
    }
}

fn add_in<T: Element>(x: &Tensor, weight: &Tensor, sum: &Tensor, dtype: cublas::cudaDataType) -> Result<()> {
    let (size_out, size_in) = weight.dims2()?;
    let rows = to_i32("rows", x.elem_count() / size_in.max(1))?;
    let (size_out, size_in) = (to_i32("size_out", size_out)?, to_i32("size_in", size_in)?);
    // It makes the GPU's context that of this thread, which cuBLAS needs.
    let launcher = Launcher::of(x)?;
    let (stream, blas) = (launcher.stream(), x.device().as_cuda_device()?.cublas_handle());
    let one = 1f32;
    let one = ptr::from_ref(&one) as *const c_void;
    written_from::<T>(sum, stream, |sum| {
        let tensors = [weight, x].map(Tensor::storage_and_layout);
        let (weight, _weight) = unaligned_address::<T>(&tensors[0].0, tensors[0].1, stream)?;
        let (x, _x) = unaligned_address::<T>(&tensors[1].0, tensors[1].1, stream)?;
        let (transposed, plain) = (cublas::cublasOperation_t::CUBLAS_OP_T, cublas::cublasOperation_t::CUBLAS_OP_N);
        // SAFETY: in cuBLAS' order by columns, sum (size_out, rows) is weight (size_in, size_out) transposed times x (size_in,
        // rows), all contiguous and held until the product is enqueued; alpha and beta are read before the call returns.
        unsafe {
            gemm_ex(
                *blas.handle(),
                transposed,
                plain,
                size_out,
                rows,
                size_in,
                one,
                weight as *const c_void,
                dtype,
                size_in,
                x as *const c_void,
                dtype,
                size_in,
                one,
                sum as *mut c_void,
                dtype,
                size_out,
                cublas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(|error| Error::wrap(error).into())
    })
}

/// Enqueues a product of many rows, whose rows of inputs have `columns` times 16 bits.
///
/// # Safety
/// `params` must be those of `kernel`, with contiguous matrices that are valid until it has run.
pub(super) unsafe fn enqueue<T: Element>(
    launcher: &Launcher,
    kernel: Kernel,
    columns: usize,
    params: &LinearParams,
) -> Result<()> {
    let (rows, weight_rows) = (params.rows as usize, params.weight_rows as usize);
    let parts = if params.is_gated == 0 { 1 } else { 2 };
    let [of_rows, of_weight] = decoder::LINEAR_TILE;
    let (size_out, of_part) = (weight_rows / parts, of_weight / parts);
    let views = [
        matrix(params.x, rows, columns, of_rows),
        matrix(params.weight, weight_rows, columns, of_part),
        matrix(params.out, rows, size_out, decoder::LINEAR_PANEL_ROWS),
    ];
    let items = rows.div_ceil(of_rows) * size_out.div_ceil(of_part);
    // SAFETY: passed on; the items are all tiles, and the views those of the kernel.
    unsafe {
        launcher.launch_on(Function::new(kernel, T::DTYPE, ANY_HEAD_DIM), views, params, Grid::Persistent { items })
    }
}

/// A contiguous matrix of 16-bit elements. Two entries of an int8 matrix count as one.
fn matrix(address: *const c_void, rows: usize, columns: usize, box_rows: usize) -> View {
    let [seq, batch] = [columns, rows * columns].map(|stride| stride as i64);
    View { address: address as u64, dims: [1, rows, 1, columns], strides: Strides { batch, seq, head: seq }, box_rows }
}
