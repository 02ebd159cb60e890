//! Operands as the kernels take them: an address and three strides, or a contiguous copy where a layout does not allow
//! that.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, SyncOnDrop, sys};
use candle_core::{CudaStorage, Layout};
use half::{bf16, f16};
use s2o_kernels::Dtype;
use s2o_kernels::params::Strides;

use crate::error::AttnError;

/// Element types of the kernels.
pub(super) trait Element: CudaDType + DeviceRepr + 'static {
    const DTYPE: Dtype;
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

/// A tensor (batch, length, heads, head_dim) in device memory, its heads contiguous.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) address: sys::CUdeviceptr,
    pub(super) dims: [usize; 4],
    pub(super) strides: Strides,
}

/// An operand, or a copy of it.
pub(super) enum Operand<'a> {
    InPlace(&'a CudaStorage, Layout),
    Copied(CudaStorage, Layout),
}

impl<'a> Operand<'a> {
    /// Copies the operand if its heads are not contiguous, or begin where no 16-byte access may, or if one element
    /// stands for several (an expanded dimension): what the kernels' loads do not take.
    pub(super) fn new(storage: &'a CudaStorage, layout: &Layout) -> Result<Self, AttnError> {
        if fits(layout) {
            return Ok(Self::InPlace(storage, layout.clone()));
        }
        // SAFETY: the copy below writes every element.
        let mut copy = unsafe { storage.device.alloc_uninit(layout.shape(), storage.dtype()) }?;
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Self::Copied(copy, Layout::contiguous(layout.shape())))
    }

    /// Where it lies, and a guard that ends the stream's use of it when dropped.
    pub(super) fn view<'v, T: Element>(&'v self, stream: &'v CudaStream) -> Result<(View, SyncOnDrop<'v>), AttnError> {
        let (storage, layout) = match self {
            Self::InPlace(storage, layout) => (*storage, layout),
            Self::Copied(storage, layout) => (storage, layout),
        };
        let (base, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
        Ok((View::new::<T>(base, layout), guard))
    }
}

impl View {
    /// Of a tensor whose storage begins at `base`.
    pub(super) fn new<T>(base: sys::CUdeviceptr, layout: &Layout) -> Self {
        let dims: [usize; 4] = layout.dims().try_into().expect("the shape was checked");
        let stride = |i: usize| {
            // A dimension of one may have any stride; this one every user of it takes.
            let stride = if dims[i] == 1 { dims[3] } else { layout.stride()[i] };
            stride as i64
        };
        Self {
            address: base + (layout.start_offset() * size_of::<T>()) as u64,
            dims,
            strides: Strides { batch: stride(0), seq: stride(1), head: stride(2) },
        }
    }

    /// The same tensor from a row on.
    pub(super) fn rows_from(self, first: usize, element_bytes: usize) -> Self {
        let [batch, len, heads, head_dim] = self.dims;
        let address = self.address + (first as u64) * (self.strides.seq as u64) * element_bytes as u64;
        Self { address, dims: [batch, len - first, heads, head_dim], ..self }
    }
}

/// Elements that a 16-byte access takes.
const VECTOR: usize = 8;

pub(super) fn fits(layout: &Layout) -> bool {
    let (dims, strides) = (layout.dims(), layout.stride());
    // Allocations are aligned far beyond 16 bytes, so the offset decides.
    layout.start_offset().is_multiple_of(VECTOR)
        && strides[3] == 1
        && dims[..3]
            .iter()
            .zip(strides)
            .all(|(&dim, &stride)| dim == 1 || (stride > 0 && stride.is_multiple_of(VECTOR)))
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
        assert!(fits(&layout([2, 10, 4, 64], [2560, 256, 64, 1], 0)), "contiguous");
        assert!(fits(&layout([2, 10, 4, 64], [2560, 64, 640, 1], 128)), "heads first, with an offset");
        assert!(fits(&layout([1, 10, 1, 64], [0, 64, 7, 1], 0)), "sizes of one have any stride");
        assert!(!fits(&layout([2, 10, 4, 64], [2560, 256, 64, 1], 4)), "an offset of 8 bytes");
        assert!(!fits(&layout([2, 10, 4, 64], [2560, 260, 64, 1], 0)), "rows at odd places");
        assert!(!fits(&layout([2, 10, 4, 64], [2560, 4, 640, 10], 0)), "head_dim not innermost");
        assert!(!fits(&layout([2, 10, 4, 64], [2560, 256, 0, 1], 0)), "expanded");
    }

    #[test]
    fn strides_of_single_dimensions_are_made_sound() {
        let view = View::new::<bf16>(1000, &layout([1, 10, 1, 64], [0, 64, 7, 1], 8));
        assert_eq!(view.address, 1016);
        assert_eq!(view.strides, Strides { batch: 64, seq: 64, head: 64 });
        assert_eq!(view.rows_from(3, 2).address, 1016 + 3 * 128);
        assert_eq!(view.rows_from(3, 2).dims, [1, 7, 1, 64]);
    }
}
