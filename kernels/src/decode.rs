//! Launch sizes of the kernels for one query per sequence (`cuda/decode.cuh`).

use crate::TILE_K;

/// Query heads of a KV head that one block computes.
pub const HEADS: usize = 16;

/// Keys of the shortest part, and of the longest before there are more parts.
const PART_KEYS: [usize; 2] = [256, 4096];
/// Number of parts while they grow, and the greatest number. An H100 runs 264 blocks at once, 33 for each of 8 KV heads.
/// With 64 parts 32K keys take 15 % more time, with 128 parts 128K keys 10 % (H200, 8 KV heads).
const PARTS: [usize; 2] = [32, 128];

/// How the keys of a call are divided. It depends on their number alone: the output of a head is the same, bit for bit,
/// whichever other heads the call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// Number of parts.
    pub count: usize,
    /// Key tiles of a part; the last part may have fewer.
    pub tiles: usize,
}

impl Parts {
    /// The parts of `k_len` keys, at least one.
    pub fn new(k_len: usize) -> Self {
        let [least, most] = PART_KEYS;
        let keys = (k_len / PARTS[0]).clamp(least, most).max(k_len.div_ceil(PARTS[1]));
        let tiles = keys.div_ceil(TILE_K);
        Self { count: k_len.div_ceil(TILE_K).div_ceil(tiles), tiles }
    }

    /// Rows of partial results for `heads` query heads of all sequences: none if the results of the one part are the
    /// output.
    pub fn rows(self, heads: usize) -> usize {
        if self.count > 1 { heads * self.count } else { 0 }
    }
}

/// Blocks for each part.
pub fn blocks(batch: usize, num_kv_heads: usize, group_size: usize) -> usize {
    batch * num_kv_heads * group_size.div_ceil(HEADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_a_gpu_and_are_not_too_many() {
        let parts = |k_len: usize| Parts::new(k_len).count;
        assert_eq!([1, 256, 257, 4096].map(parts), [1, 1, 2, 16]);
        assert_eq!([8192, 32768, 131_072, 262_144, 1_048_576].map(parts), [32, 32, 32, 64, 128]);
        assert!((1..300_000).all(|k_len| parts(k_len) <= 128));
    }

    #[test]
    fn one_part_has_no_partial_results() {
        assert_eq!([1, 256, 257].map(|k_len| Parts::new(k_len).rows(5)), [0, 0, 10]);
        assert_eq!(blocks(2, 3, 17), 12);
    }
}
