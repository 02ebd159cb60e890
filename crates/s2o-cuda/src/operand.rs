//! Tensors in the form that kernels take: an address, and three strides for (batch, length, heads, head_dim). A tensor
//! whose layout does not allow that is copied.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaStorage, Error, Layout, Storage};
use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, SyncOnDrop, sys};
use half::{bf16, f16};
use s2o_kernels::params::Strides;
use s2o_kernels::{Dtype, TILE_K};

use crate::error::{CudaError, Doing, check_i32};

/// Element types of the kernels.
pub trait Element: CudaDType + DeviceRepr + 'static {
    /// The kernels' name of the type.
    const DTYPE: Dtype;
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

/// A tensor (batch, length, heads, head_dim) in device memory, with contiguous heads.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Address of the first element.
    pub address: sys::CUdeviceptr,
    /// Batch, length, heads and head_dim.
    pub dims: [usize; 4],
    /// Strides in elements.
    pub strides: Strides,
    /// Most rows that a kernel reads at once through a tensor map.
    pub box_rows: usize,
}

/// An operand, or a copy of it.
#[derive(Debug)]
pub struct Operand<'a> {
    storage: &'a CudaStorage,
    /// Contiguous, read in place of the storage.
    copy: Option<CudaStorage>,
    layout: Layout,
}

impl<'a> Operand<'a> {
    /// Copies an operand of 4 dimensions if the loads of the kernels do not support its layout: heads that are not
    /// contiguous or do not start at multiples of 16 bytes, or an expanded dimension.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`] if Candle's copy cannot count the elements; Candle's error if memory runs out.
    pub fn new(storage: &'a CudaStorage, layout: &Layout) -> Result<Self, CudaError> {
        if is_vectorized(layout) {
            return Ok(Self { storage, copy: None, layout: layout.clone() });
        }
        check_copy(layout)?;
        // SAFETY: the copy below writes every element.
        let mut copy = unsafe { storage.device.alloc_uninit(layout.shape(), storage.dtype()) }?;
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Self { storage, copy: Some(copy), layout: Layout::contiguous(layout.shape()) })
    }

    /// The operand's view, and a guard that ends the stream's use of it when dropped.
    ///
    /// # Errors
    /// If the operand has elements of another type.
    pub fn view<'v, T: Element>(&'v self, stream: &'v CudaStream) -> Result<(View, SyncOnDrop<'v>), CudaError> {
        let storage = self.copy.as_ref().unwrap_or(self.storage);
        let (base, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
        Ok((View::new::<T>(base, &self.layout)?, guard))
    }
}

/// Refuses a layout that Candle's copy, which counts in 32 bits, would copy wrongly or without end.
fn check_copy(layout: &Layout) -> Result<(), CudaError> {
    let last = layout.dims().iter().zip(layout.stride()).map(|(dim, stride)| dim.saturating_sub(1) * stride).sum();
    check_i32("elements of a tensor whose layout must be copied", layout.shape().elem_count())?;
    check_i32("elements between the first and the last of a tensor whose layout must be copied", last)
}

impl View {
    /// The view of a tensor whose storage begins at `base`.
    ///
    /// # Errors
    /// If the layout does not have 4 dimensions.
    pub fn new<T>(base: sys::CUdeviceptr, layout: &Layout) -> Result<Self, CudaError> {
        let dims: [usize; 4] = layout.shape().dims4()?.into();
        let stride = |i: usize| {
            // A dimension of size 1 may have any stride; this value suits every kernel.
            let stride = if dims[i] == 1 { dims[3] } else { layout.stride()[i] };
            stride as i64
        };
        Ok(Self {
            address: base + (layout.start_offset() * size_of::<T>()) as u64,
            dims,
            strides: Strides { batch: stride(0), seq: stride(1), head: stride(2) },
            box_rows: TILE_K,
        })
    }

    /// Some of its sequences and heads.
    pub fn part(self, batch: Range<usize>, heads: Range<usize>, element_bytes: usize) -> Self {
        let Strides { batch: of_batch, head: of_head, .. } = self.strides;
        let first = batch.start as u64 * of_batch as u64 + heads.start as u64 * of_head as u64;
        let dims = [batch.len(), self.dims[1], heads.len(), self.dims[3]];
        Self { address: self.address + first * element_bytes as u64, dims, ..self }
    }

    /// The same tensor from row `first` on.
    pub fn rows_from(self, first: usize, element_bytes: usize) -> Self {
        let [batch, len, heads, head_dim] = self.dims;
        let address = self.address + (first as u64) * (self.strides.seq as u64) * element_bytes as u64;
        Self { address, dims: [batch, len - first, heads, head_dim], ..self }
    }
}

/// The TMA descriptor with which the sm_90a kernels read whole tiles of `view`: boxes of `box_rows` rows of one head, swizzled as
/// wgmma reads them. Rows beyond it are zeros. A kernel takes the descriptor by value; its alignment differs between
/// toolkits, so it has the binding's type.
pub(crate) fn tensor_map(view: &View, box_rows: usize, dtype: Dtype) -> Result<sys::CUtensorMap, CudaError> {
    /// Elements in the 128 bytes of a box row.
    const BOX_COLUMNS: u32 = 64;
    const ELEMENT_BYTES: u64 = 2;
    let [batch, len, heads, head_dim] = view.dims.map(|dim| dim as u64);
    let dims = [head_dim, len, heads, batch];
    let strides = [view.strides.seq, view.strides.head, view.strides.batch].map(|s| s as u64 * ELEMENT_BYTES);
    let box_dims = [BOX_COLUMNS, box_rows as u32, 1, 1];
    let element_strides = [1u32; 4];
    let data_type = match dtype {
        Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Dtype::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let mut map = MaybeUninit::uninit();
    // SAFETY: the arrays have the rank's number of elements (the strides one less); the driver checks their values.
    // The map is read after the call that writes it succeeded.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            data_type,
            4,
            view.address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            box_dims.as_ptr(),
            element_strides.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .doing("describing a tensor for TMA")?;
        Ok(map.assume_init())
    }
}

/// 16-bit elements in a 16-byte access.
const VECTOR: usize = 8;

/// Whether 16-byte accesses can read a tensor of 16-bit elements with this layout of 4 dimensions in place.
pub fn is_vectorized(layout: &Layout) -> bool {
    let (dims, strides) = (layout.dims(), layout.stride());
    // Allocations are aligned far beyond 16 bytes, so the offset decides.
    layout.start_offset().is_multiple_of(VECTOR)
        && strides.last() == Some(&1)
        && dims[..dims.len() - 1]
            .iter()
            .zip(strides)
            .all(|(&dim, &stride)| dim == 1 || (stride > 0 && stride.is_multiple_of(VECTOR)))
}

/// The storage, or [`CudaError::NotOnGpu`].
pub fn cuda_storage(storage: &Storage) -> Result<&CudaStorage, CudaError> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => Err(CudaError::NotOnGpu),
    }
}

/// The address of a contiguous tensor whose offset suits 16-byte accesses to elements of 16 bits, and a guard that ends
/// the stream's use of it when dropped.
///
/// # Errors
/// If the tensor is not on a GPU, not contiguous, not at a multiple of 8 elements, or has another element type.
pub fn address<'a, T: CudaDType + DeviceRepr + 'static>(
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<(sys::CUdeviceptr, SyncOnDrop<'a>), CudaError> {
    if !layout.start_offset().is_multiple_of(VECTOR) {
        return Err(Error::RequiresContiguous { op: "s2o-cuda" }.bt().into());
    }
    unaligned_address::<T>(storage, layout, stream)
}

/// [`address`] at any offset, for kernels that access single elements.
///
/// # Errors
/// If the tensor is not on a GPU, not contiguous, or has elements of another type.
pub fn unaligned_address<'a, T: CudaDType + DeviceRepr + 'static>(
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<(sys::CUdeviceptr, SyncOnDrop<'a>), CudaError> {
    if !layout.is_contiguous() {
        return Err(Error::RequiresContiguous { op: "s2o-cuda" }.bt().into());
    }
    let (base, guard) = cuda_storage(storage)?.as_cuda_slice::<T>()?.device_ptr(stream);
    Ok((base + (layout.start_offset() * size_of::<T>()) as sys::CUdeviceptr, guard))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Shape;

    fn layout(dims: [usize; 4], strides: [usize; 4], offset: usize) -> Layout {
        Layout::new(Shape::from_dims(&dims), strides.to_vec(), offset)
    }

    #[test]
    fn what_the_loads_take_stays_in_place() {
        assert!(is_vectorized(&layout([2, 10, 4, 64], [2560, 256, 64, 1], 0)), "contiguous");
        assert!(is_vectorized(&layout([2, 10, 4, 64], [2560, 64, 640, 1], 128)), "heads first, with an offset");
        assert!(is_vectorized(&layout([1, 10, 1, 64], [0, 64, 7, 1], 0)), "sizes of one have any stride");
        assert!(!is_vectorized(&layout([2, 10, 4, 64], [2560, 256, 64, 1], 4)), "an offset of 8 bytes");
        assert!(!is_vectorized(&layout([2, 10, 4, 64], [2560, 260, 64, 1], 0)), "rows at odd places");
        assert!(!is_vectorized(&layout([2, 10, 4, 64], [2560, 4, 640, 10], 0)), "head_dim not innermost");
        assert!(!is_vectorized(&layout([2, 10, 4, 64], [2560, 256, 0, 1], 0)), "expanded");
    }

    #[test]
    fn copies_that_candle_counts_in_more_than_32_bits_are_refused() {
        let of = |dims, strides| check_copy(&layout(dims, strides, 0));
        assert!(of([1, 1 << 17, 128, 127], [0, 127, 0, 1]).is_ok(), "keys of one head for 128");
        let most = i32::MAX as usize;
        let error = of([1, 1 << 17, 128, 128], [0, 128, 0, 1]).unwrap_err();
        assert!(matches!(error, CudaError::TooLarge { max, got, .. } if max == most && got == most + 1), "{error}");
        let error = of([1, 3, 1, 64], [0, 1 << 30, 1 << 30, 2]).unwrap_err();
        assert!(
            matches!(error, CudaError::TooLarge { max, got, .. } if max == most && got == (2 << 30) + 126),
            "{error}"
        );
    }

    #[test]
    fn strides_of_single_dimensions_are_made_sound() {
        let view = View::new::<bf16>(1000, &layout([1, 10, 1, 64], [0, 64, 7, 1], 8)).unwrap();
        assert_eq!(view.address, 1016);
        assert_eq!(view.strides, Strides { batch: 64, seq: 64, head: 64 });
        assert_eq!(view.rows_from(3, 2).address, 1016 + 3 * 128);
        assert_eq!(view.rows_from(3, 2).dims, [1, 7, 1, 64]);
        let view = View::new::<bf16>(1000, &layout([3, 10, 4, 64], [2560, 256, 64, 1], 0)).unwrap();
        let part = view.part(1..3, 2..4, 2);
        assert_eq!((part.address, part.dims), (1000 + 2 * (2560 + 128), [2, 10, 2, 64]));
    }
}
