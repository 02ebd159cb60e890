//! Sizes that the launches of the selectors' kernels follow from, as `cuda/row_entries.cuh` has them.

/// Threads of a block of the row kernels.
pub const ROW_THREADS: usize = 128;
/// Longest row that a warp keeps in its registers.
pub const WARP_ENTRIES: usize = 2048;
/// Longest row that a block keeps; the `row_choice` kernel takes no longer ones.
pub const BLOCK_ENTRIES: usize = 8192;
/// Entries of a long row that a block takes.
pub const LONG_CHUNK: usize = 16384;
/// Longest row of all.
pub const MAX_ROW: usize = 1 << 30;
/// Launches after which a long row is chosen from.
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
