//! The compiled CUDA kernels of candle-s2o, and the structs and constants that a host needs to launch them. The crate
//! needs no Candle, CUDA binding or GPU. `modules` returns the code (with the feature `cuda`), [`Function`] names a
//! kernel in it, [`params`] and [`LaunchInfo`] mirror the structs of `cuda/params.cuh` and `cuda/launch.cuh`.

mod arch;
pub mod decode;
pub mod decoder;
mod function;
#[cfg(feature = "cuda")]
mod modules;
pub mod params;
pub mod ranking;
pub mod selection;

pub use arch::Arch;
pub use function::{Dtype, Function, HeadDim, Kernel};
#[cfg(feature = "cuda")]
pub use modules::{Code, Module, modules};

/// Query rows of a tile (the paper's B_M) in every kernel.
pub const TILE_Q: usize = 128;
/// Keys of a tile (B_N) in every kernel.
pub const TILE_K: usize = 128;
/// Fewest rows of a page that [`Kernel::DensePaged`] copies at once.
pub const LEAST_BOX_ROWS: usize = 16;
/// Warps of a block of [`Kernel::Merge`].
pub const MERGE_WARPS: usize = 8;

/// Launch settings of a kernel, stored in its module as the symbol [`Function::launch_symbol`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchInfo {
    /// Threads of a block; 0 if the number depends on the call, see [`decoder`].
    pub threads: i32,
    /// Dynamic shared memory in bytes; 0 if the size depends on the call, see [`ranking`].
    pub shared_bytes: i32,
    /// Blocks of a persistent kernel on one multiprocessor, where so many fit; the grid of other kernels is documented at
    /// the kernel.
    pub blocks_per_sm: i32,
    /// TMA descriptors (queries, keys, values) before the parameters, or 0.
    pub tensor_maps: i32,
    /// 1 if the kernel may be scheduled while the kernel before it runs (programmatic dependent launch), or 0.
    pub overlaps: i32,
    /// Most rows of keys and values that the kernel copies at once through a TMA descriptor, or 0.
    pub box_rows: i32,
}
const _: () = assert!(size_of::<LaunchInfo>() == 24);

impl LaunchInfo {
    /// Thread blocks of a persistent kernel for so many items, if `fitting` blocks fit one multiprocessor. More blocks
    /// than run at the same time would be slow: a late block begins with an item that should have been among the first.
    /// If none fits, the driver must refuse the launch, so there is one.
    pub fn persistent_blocks(&self, items: usize, multiprocessors: usize, fitting: usize) -> usize {
        items.min(multiprocessors * (self.blocks_per_sm as usize).min(fitting.max(1)))
    }

    /// Decodes the bytes of the symbol.
    pub fn from_bytes(bytes: [u8; 24]) -> Self {
        let word = |i: usize| i32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]);
        Self {
            threads: word(0),
            shared_bytes: word(1),
            blocks_per_sm: word(2),
            tensor_maps: word(3),
            overlaps: word(4),
            box_rows: word(5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_persistent_kernel_has_no_more_blocks_than_run_at_once() {
        let info =
            LaunchInfo { threads: 128, shared_bytes: 0, blocks_per_sm: 2, tensor_maps: 0, overlaps: 0, box_rows: 0 };
        for (items, fitting, blocks) in
            [(1000, 4, 264), (1000, 2, 264), (1000, 1, 132), (1000, 0, 132), (200, 2, 200), (0, 2, 0)]
        {
            assert_eq!(info.persistent_blocks(items, 132, fitting), blocks, "{items} items, {fitting} fit");
        }
    }
}
