//! Launches of the kernels of int8 linear layers. The callers check shapes.

use std::ffi::c_void;

use candle_core::{DType, Device, Shape, Tensor};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, SyncOnDrop, sys};
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, address, to_i32};
use s2o_kernels::params::{LinearParams, QuantiseParams};
use s2o_kernels::{Function, Kernel, decoder};

use super::{Int8Linear, MAX_WIDTH, RotatedInt8};
use crate::fused::linear::FEW_ROWS;
use crate::fused::products;
use crate::fused::written::{with_width, written_from};

// Builds without the kernels know this limit too.
const _: () = assert!(MAX_WIDTH == decoder::MAX_ROW_WIDTH);

type Result<T> = std::result::Result<T, CudaError>;

pub(super) fn is_supported(device: &Device) -> bool {
    let launcher = device.as_cuda_device().map_err(CudaError::from).and_then(Launcher::new);
    launcher.is_ok_and(|launcher| launcher.has(Kernel::LinearInt8))
}

/// Memory that a kernel writes quantised rows to.
pub(in crate::fused) struct Quantised {
    values: CudaSlice<u8>,
    scales: CudaSlice<f32>,
    shape: Shape,
}

impl Quantised {
    /// Memory for rows `(.., width)`.
    pub(in crate::fused) fn new(launcher: &Launcher, shape: &Shape, width: usize) -> Result<Self> {
        Ok(Self {
            values: launcher.uninit::<u8>(shape)?,
            scales: launcher.uninit::<f32>(&Shape::from(shape.elem_count() / width))?,
            shape: shape.clone(),
        })
    }

    /// The addresses of values and scales, and guards that end the stream's use of them when dropped.
    pub(in crate::fused) fn addresses<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (*mut c_void, *mut f32, [SyncOnDrop<'a>; 2]) {
        let (values, of_values) = self.values.device_ptr_mut(stream);
        let (scales, of_scales) = self.scales.device_ptr_mut(stream);
        (values as *mut c_void, scales as *mut f32, [of_values, of_scales])
    }

    pub(in crate::fused) fn written(self, launcher: &Launcher, dtype: DType) -> RotatedInt8 {
        let rows = Shape::from(self.scales.len());
        RotatedInt8 {
            values: launcher.tensor(self.values, self.shape),
            scales: launcher.tensor(self.scales, rows),
            dtype,
        }
    }
}

/// Quantises a contiguous tensor.
pub(super) fn quantise(x: &Tensor) -> Result<RotatedInt8> {
    match x.dtype() {
        DType::BF16 => quantise_rows::<bf16>(x),
        _ => quantise_rows::<f16>(x),
    }
}

fn quantise_rows<T: Element>(x: &Tensor) -> Result<RotatedInt8> {
    let launcher = Launcher::of(x)?;
    let stream = launcher.stream();
    let width = x.dims().last().copied().unwrap_or_default();
    check_row(width)?;
    let mut out = Quantised::new(&launcher, x.shape(), width)?;
    {
        let x = x.storage_and_layout();
        let (address, _x) = address::<T>(&x.0, x.1, stream)?;
        let (values, scales, _guards) = out.addresses(stream);
        let params = QuantiseParams { x: address as *const c_void, out: values, scales, width: width as i64 };
        // SAFETY: one thread block per row of contiguous tensors, all held until the launch is enqueued.
        unsafe {
            launcher.launch(
                Function::new(Kernel::Quantise, T::DTYPE, ANY_HEAD_DIM),
                &params,
                rows_grid(x.1.shape().elem_count() / width, decoder::row_threads(width)),
            )
        }?;
    }
    Ok(out.written(&launcher, x.dtype()))
}

/// One block per row, whose registers hold it.
pub(in crate::fused) fn rows_grid(rows: usize, threads: usize) -> Grid {
    Grid::Shaped { blocks: [rows, 1, 1], threads: Some(threads), shared_bytes: None }
}

/// Refuses rows that the registers of a block do not hold.
fn check_row(width: usize) -> Result<()> {
    match width {
        1..=MAX_WIDTH => Ok(()),
        got => {
            let expected = format!("1 to {MAX_WIDTH}");
            Err(CudaError::Size { name: "width of quantised rows", expected, got })
        }
    }
}

/// The product, or gated product, in the dtype of `x` before it was quantised.
pub(super) fn product(x: &RotatedInt8, linear: &Int8Linear) -> Result<Tensor> {
    match x.dtype {
        DType::BF16 => product_in::<bf16>(x, linear),
        _ => product_in::<f16>(x, linear),
    }
}

fn product_in<T: Element>(x: &RotatedInt8, linear: &Int8Linear) -> Result<Tensor> {
    let launcher = Launcher::of(&x.values)?;
    let shape = with_width(x.values.dims(), linear.size_out()?);
    let mut out = launcher.uninit::<T>(&shape)?;
    {
        let (out, _out) = out.device_ptr_mut(launcher.stream());
        // SAFETY: the memory has the size of the outputs and is held until the launch is enqueued.
        unsafe { enqueue::<T>(&launcher, x, linear, (out, false)) }?;
    }
    Ok(launcher.tensor(out, shape))
}

/// Adds the product, rounded, to contiguous `sum` of its shape, in the dtype of `x` before it was quantised.
pub(super) fn add_product(x: &RotatedInt8, linear: &Int8Linear, sum: &Tensor) -> Result<()> {
    match x.dtype {
        DType::BF16 => add_product_in::<bf16>(x, linear, sum),
        _ => add_product_in::<f16>(x, linear, sum),
    }
}

fn add_product_in<T: Element>(x: &RotatedInt8, linear: &Int8Linear, sum: &Tensor) -> Result<()> {
    let launcher = Launcher::of(&x.values)?;
    written_from::<T>(sum, launcher.stream(), |first| {
        // SAFETY: the caller has checked shape, layout and offset; the memory is held until the launch is enqueued.
        unsafe { enqueue::<T>(&launcher, x, linear, (first, true)) }
    })
}

/// Enqueues the product into memory at an address, or its addition to what the memory holds.
///
/// # Safety
/// The memory must have the size of the outputs, begin at a multiple of 16 bytes, and be valid until the kernel has run.
unsafe fn enqueue<T: Element>(
    launcher: &Launcher,
    x: &RotatedInt8,
    linear: &Int8Linear,
    (out, adds): (sys::CUdeviceptr, bool),
) -> Result<()> {
    let stream = launcher.stream();
    let weight = &linear.weight;
    let (weight_rows, size_in) = weight.values.dims2()?;
    let rows = x.values.elem_count() / size_in;
    let tensors = [&x.values, &weight.values].map(Tensor::storage_and_layout);
    let scales = [&x.scales, &weight.scales].map(Tensor::storage_and_layout);
    let (x, _x) = address::<u8>(&tensors[0].0, tensors[0].1, stream)?;
    let (weight, _weight) = address::<u8>(&tensors[1].0, tensors[1].1, stream)?;
    let (x_scales, _x_scales) = address::<f32>(&scales[0].0, scales[0].1, stream)?;
    let (weight_scales, _weight_scales) = address::<f32>(&scales[1].0, scales[1].1, stream)?;
    let params = LinearParams {
        x: x as *const c_void,
        weight: weight as *const c_void,
        x_scales: x_scales as *const f32,
        weight_scales: weight_scales as *const f32,
        out: out as *mut c_void,
        rows: to_i32("rows", rows)?,
        width_in: to_i32("size_in", size_in)?,
        weight_rows: to_i32("rows of the weight", weight_rows)?,
        is_gated: linear.is_gated.into(),
        adds: adds.into(),
    };
    // SAFETY: the grid covers every output of every row (sizes are multiples of 16, which `Int8Linear` checks); the
    // matrices are contiguous, and all tensors are held until the launch is enqueued.
    unsafe {
        if rows <= FEW_ROWS {
            let blocks = [weight_rows / decoder::FEW_ROWS_OUTPUTS, rows.div_ceil(decoder::FEW_ROWS), 1];
            let function = Function::new(Kernel::FewRowsInt8, T::DTYPE, ANY_HEAD_DIM);
            launcher.launch(function, &params, Grid::Blocks(blocks))
        } else {
            let kernel = if linear.is_gated { Kernel::GatedLinearInt8 } else { Kernel::LinearInt8 };
            products::enqueue::<T>(launcher, kernel, size_in / 2, &params)
        }
    }
}
