//! TMA descriptors, with which the sm_90a kernels read whole tiles of a tensor.

use std::mem::MaybeUninit;

use cudarc::driver::sys;
use s2o_kernels::{Dtype, TILE_K};

use crate::error::{CudaError, Doing};
use crate::operand::View;

/// Describes `view` in boxes of 128 rows of one head, swizzled as wgmma reads them. Rows beyond it are zeros. A kernel
/// takes the descriptor by value.
pub(crate) fn tensor_map(view: &View, dtype: Dtype) -> Result<sys::CUtensorMap, CudaError> {
    /// Elements in the 128 bytes of a box row.
    const BOX_COLUMNS: u32 = 64;
    const ELEMENT_BYTES: u64 = 2;
    let [batch, len, heads, head_dim] = view.dims.map(|dim| dim as u64);
    let dims = [head_dim, len, heads, batch];
    let strides = [view.strides.seq, view.strides.head, view.strides.batch].map(|s| s as u64 * ELEMENT_BYTES);
    let box_dims = [BOX_COLUMNS, TILE_K as u32, 1, 1];
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
