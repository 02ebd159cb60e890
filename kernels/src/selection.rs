//! Launch sizes of the selectors' kernels, equal to those in `cuda/row_entries.cuh`.

/// Threads of a block of the row kernels.
pub const ROW_THREADS: usize = 128;
/// Entries of the longest row that a warp keeps in its registers.
pub const WARP_ENTRIES: usize = 2048;
/// Entries of the longest row that a block keeps in its registers, and of the longest row of `row_choice`.
pub const BLOCK_ENTRIES: usize = 8192;
/// Entries of a long row per block.
pub const LONG_CHUNK: usize = 16384;
/// Entries of the longest supported row.
pub const MAX_ROW: usize = 1 << 30;
/// Launches of `row_choice_long` for a long row.
pub const LONG_PASSES: i32 = 4;

/// Blocks of the `row_choice` and `row_softmax` kernels.
pub fn row_blocks(rows: usize, row_len: usize) -> usize {
    if row_len <= WARP_ENTRIES { rows.div_ceil(ROW_THREADS / 32) } else { rows }
}

/// Blocks of the `row_choice_long` kernel.
pub fn long_row_blocks(rows: usize, row_len: usize) -> usize {
    rows * row_len.div_ceil(LONG_CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_threads() {
        assert_eq!([1, 4, 5].map(|rows| row_blocks(rows, WARP_ENTRIES)), [1, 1, 2]);
        assert_eq!(row_blocks(5, WARP_ENTRIES + 1), 5);
        assert_eq!([1, LONG_CHUNK, LONG_CHUNK + 1].map(|len| long_row_blocks(3, len)), [3, 3, 6]);
    }
}
