//! Sizes that the launches of the decoder's kernels follow from, as `cuda/decoder.cu` has them.

/// Elements of one access, and of what every width is a multiple of.
pub const VECTOR: usize = 8;
/// Widest row that the norm kernel holds in its registers.
pub const MAX_NORM_WIDTH: usize = 1024 * 4 * VECTOR;

/// Threads of a block of the norm kernel: two vectors for each until there are no more threads.
pub fn norm_threads(width: usize) -> usize {
    (width / VECTOR).div_ceil(2).next_multiple_of(32).min(1024)
}

/// Blocks that share out a row of the `silu_mul` kernel.
pub fn silu_blocks(width: usize) -> usize {
    (width / VECTOR).div_ceil(256 * 4)
}

/// Threads of a block of the rotation kernel, which takes two heads at a time.
pub fn rotate_threads(heads: usize, head_dim: usize) -> usize {
    (heads.div_ceil(2) * head_dim / (2 * VECTOR)).next_multiple_of(32).min(256)
}

/// Blocks of the kernel that makes `entries` pairs of cos and sin.
pub fn table_blocks(entries: usize) -> usize {
    entries.div_ceil(256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_rows_fit_their_threads() {
        for width in (VECTOR..=MAX_NORM_WIDTH).step_by(VECTOR) {
            let threads = norm_threads(width);
            assert!(threads.is_multiple_of(32) && threads <= 1024 && 4 * threads * VECTOR >= width, "{width}");
        }
        assert_eq!([64, 4096, 14336].map(norm_threads), [32, 256, 896]);
    }

    #[test]
    fn rotations_fill_whole_warps() {
        assert_eq!(rotate_threads(48, 128), 192);
        assert_eq!(rotate_threads(3, 64), 32);
        assert_eq!(rotate_threads(1000, 128), 256);
    }
}
