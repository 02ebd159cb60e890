//! Launch sizes of the decoder's kernels, equal to those in `cuda/decoder.cu`, `cuda/int8.cu`,
//! `cuda/join_heads.cu`, `cuda/sm90/linear_int8_steps.cu` and `cuda/sm90/linear.cuh`.

/// Elements of one 16-byte access. Every width is a multiple of it.
pub const VECTOR: usize = 8;
/// Elements of the widest row that a block holds in its registers.
pub const MAX_ROW_WIDTH: usize = 1024 * 4 * VECTOR;

/// Threads of a block that holds a row: a warp for every 1024 elements.
pub fn row_threads(width: usize) -> usize {
    32 * width.div_ceil(32 * 4 * VECTOR)
}

/// Blocks per row of the `silu_mul` kernel.
pub fn silu_blocks(width: usize) -> usize {
    (width / VECTOR).div_ceil(256 * 4)
}

/// Rows of a block of the `few_rows_int8` kernel.
pub const FEW_ROWS: usize = 8;
/// Rows of the weight of a block of the `few_rows_int8` kernel. The number of rows is a multiple of it.
pub const FEW_ROWS_OUTPUTS: usize = 16;
/// Rows, and rows of the weight, of a tile of the products of many rows.
pub const LINEAR_TILE: [usize; 2] = [128, 256];
/// Rows that these products store at once.
pub const LINEAR_PANEL_ROWS: usize = 64;

/// Threads per block of the rotation kernel: enough for half of the heads, at most 256.
pub fn rotate_threads(heads: usize, head_dim: usize) -> usize {
    (heads.div_ceil(2) * head_dim / (2 * VECTOR)).next_multiple_of(32).min(256)
}

/// Rows of a block of the `join_heads` kernel.
pub const JOIN_ROWS: usize = 4;

/// Blocks of the `store_int8` and `load_int8` kernels for `rows` rows of a sequence.
pub fn int8_blocks(rows: usize, head_dim: usize) -> usize {
    rows.div_ceil(4 * 256 / (head_dim / VECTOR))
}

/// Blocks of the `rotation_table` kernel for `entries` pairs of cos and sin.
pub fn table_blocks(entries: usize) -> usize {
    entries.div_ceil(256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_their_threads() {
        for width in (VECTOR..=MAX_ROW_WIDTH).step_by(VECTOR) {
            let threads = row_threads(width);
            assert!(threads.is_multiple_of(32) && threads <= 1024 && 4 * threads * VECTOR >= width, "{width}");
        }
        assert_eq!([64, 4096, 14336].map(row_threads), [32, 128, 448]);
    }

    #[test]
    fn blocks_of_8_bits_hold_every_row() {
        assert_eq!([1, 64, 65].map(|rows| int8_blocks(rows, 128)), [1, 1, 2]);
        assert_eq!([0, 128, 129].map(|rows| int8_blocks(rows, 64)), [0, 1, 2]);
    }

    #[test]
    fn rotations_fill_whole_warps() {
        assert_eq!(rotate_threads(48, 128), 192);
        assert_eq!(rotate_threads(3, 64), 32);
        assert_eq!(rotate_threads(1000, 128), 256);
    }
}
