//! Parameters of the kernels, mirrored field by field from the structs of the same names in `cuda/*.cuh` and
//! `cuda/*.cu`, which document shapes and units. Both sides assert the layouts. Strides are in elements, pointers are
//! device addresses.
#![expect(missing_docs, reason = "the fields are documented where the kernels read them")]

mod attention;
mod decoder;
mod ranking;
mod selection;

pub use attention::*;
pub use decoder::*;
pub use ranking::*;
pub use selection::*;

/// Types that a kernel may take by value.
///
/// # Safety
/// The type is `repr(C)`, plain data, and has the layout of the kernels' struct of the same name.
pub unsafe trait Params: Copy {}

/// Strides of a tensor whose innermost dimension is contiguous.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strides {
    pub batch: i64,
    pub seq: i64,
    pub head: i64,
}

macro_rules! layout {
    ($type:ident: $size:literal $(, $field:ident at $offset:literal)*) => {
        const _: () = assert!(size_of::<$type>() == $size $(&& std::mem::offset_of!($type, $field) == $offset)*);
        // SAFETY: repr(C), integers, floats and addresses only; the headers in cuda/ assert the same size and offsets.
        unsafe impl Params for $type {}
    };
}
use layout;
