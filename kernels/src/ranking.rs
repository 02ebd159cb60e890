//! Launch sizes of the ranking kernels, equal to those in `cuda/ranking_*.cuh`.

/// Keys that share one (factor, offset) pair for their 16-bit scores.
pub const SCORE_BLOCK: usize = 64;

/// A block of the scores kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreShape {
    /// Warps, with 16 rows of scores each (one row per segment and head).
    pub warps: usize,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: usize,
}

impl ScoreShape {
    /// The smallest block for `rows` rows that share a KV head, because every warp takes registers. Small blocks have shared
    /// memory for two key tiles instead of three, so that more of them fit.
    pub fn fitting(rows: usize, head_dim: usize) -> Self {
        let (warps, tiles) = match rows {
            ..=16 if head_dim <= 128 => (1, 2),
            ..=32 => (2, 2),
            _ => (4, 3),
        };
        Self { warps, shared_bytes: tiles * SCORE_BLOCK * head_dim * 2 }
    }

    /// Rows of a block.
    pub fn rows(self) -> usize {
        16 * self.warps
    }
}

/// In long prompts this many keys before a segment are sorted, the best ones. The others follow in their natural order. It is a
/// window of an H100, less the keys of a bucket.
pub const SORTED_KEYS: i32 = 39_936;

/// Blocks of the scores kernel that share the `tiles` key tiles (of [`SCORE_BLOCK`] keys) before the last segment.
/// `others` is the number of its blocks in y and z. All blocks run at once if none gets more than 24 tiles; otherwise they
/// take 16, enough to amortise the load of the coefficients.
pub fn score_blocks(tiles: usize, others: usize, multiprocessors: usize) -> usize {
    const AT_ONCE: usize = 3; // blocks of a multiprocessor
    let in_one_round = (tiles * others).div_ceil(AT_ONCE * multiprocessors).max(2);
    tiles.div_ceil(if in_one_round <= 24 { in_one_round } else { 16 })
}

/// Blocks of the moments kernel that share a segment's queries. The number depends on nothing else, because sums in other
/// parts round differently: a head has the same order in every call.
pub fn moment_splits(segment_len: usize) -> usize {
    (segment_len / 512).max(1)
}

/// Sizes of the counting sort of a row of scores, which is placed in shared memory one window at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SortShape {
    /// Threads of a block.
    pub threads: usize,
    /// Number of buckets, a power of two.
    pub buckets: usize,
    /// Entries placed at a time, a multiple of 64.
    pub window: usize,
    /// Blocks that a multiprocessor holds.
    pub per_multiprocessor: usize,
}

impl SortShape {
    /// Words in addition to the buckets, the window, and one word for each 32 entries of the window.
    const MORE: usize = 64 + 128 + 32;

    /// The largest shape for rows of `longest` keys. `shared_bytes` is the most that a block may have. The number of buckets
    /// changes the order, so it depends on the length of the whole prompt: all its chunks have one order. Up to 64K tokens two
    /// blocks of half the size share a multiprocessor of an H100 or H200, and one computes while the other waits. Their windows
    /// are smaller, so longer rows would be read too often.
    pub fn fitting(shared_bytes: usize, longest: usize, prompt_len: usize) -> Self {
        const KIB: usize = 1 << 10;
        // At least as much shared memory as an H100, and as an A100.
        let is_largest = shared_bytes >= 200 * KIB;
        let is_large = shared_bytes >= 128 * KIB;
        let (threads, buckets, per_multiprocessor) = match prompt_len {
            ..=65_536 if is_largest => (512, 8192, 2),
            16_385.. if is_large => (1024, 16_384, 1),
            _ => (512, 8192, 1),
        };
        // A multiprocessor has 1 KiB more than a block may use. Each block loses 1 KiB to the system, and half of one to
        // the kernel's own variables.
        let of_block = if per_multiprocessor == 1 { shared_bytes } else { shared_bytes / 2 - KIB };
        let room = (of_block / 4 - buckets - Self::MORE) / 33 * 32;
        Self { threads, buckets, window: room.min(longest.next_multiple_of(64)) / 64 * 64, per_multiprocessor }
    }

    /// Dynamic shared memory in bytes.
    pub fn shared_bytes(self) -> usize {
        4 * (self.buckets + self.window + self.window / 32 + Self::MORE)
    }
}

/// Dynamic shared memory in bytes to order the queries of one segment.
pub fn query_order_shared_bytes(segment_len: usize) -> usize {
    8 * segment_len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_scores_have_the_warps_that_their_rows_need() {
        for (rows, head_dim, warps) in
            [(1, 64, 1), (16, 128, 1), (16, 256, 2), (17, 128, 2), (32, 64, 2), (33, 128, 4), (1000, 256, 4)]
        {
            let shape = ScoreShape::fitting(rows, head_dim);
            assert_eq!(shape.warps, warps, "{rows} rows of head_dim {head_dim}");
            // Two key tiles, or three for four warps.
            assert_eq!(shape.shared_bytes, (2 + warps / 4) * 64 * 2 * head_dim);
        }
    }

    #[test]
    fn blocks_of_scores_run_at_once_if_they_can() {
        // Needle-7m's 12 KV heads at 32K on an H200: 16 tiles each, 372 of at most 396 blocks.
        assert_eq!(score_blocks(496, 12, 132), 31);
        // 24 tiles each fill the GPU, 25 would; so many rounds of 16 follow.
        assert_eq!(score_blocks(792, 12, 132), 33);
        assert_eq!(score_blocks(793, 12, 132), 50);
        // At least two tiles.
        assert_eq!(score_blocks(5, 1, 132), 3);
        assert_eq!(score_blocks(1, 1, 132), 1);
    }

    #[test]
    fn sorts_fit_every_gpu() {
        // Consumer cards, A100, H200.
        for limit in [99 << 10, 163 << 10, 227 << 10] {
            for longest in [256, 5000, 1 << 20] {
                for prompt_len in [longest, 1 << 16, 1 << 20] {
                    let shape = SortShape::fitting(limit, longest, prompt_len);
                    assert!(shape.shared_bytes() <= limit, "{shape:?}");
                    assert!(shape.window >= 8192.min(longest) && shape.window.is_multiple_of(64), "{shape:?}");
                    assert!(shape.window >= longest.min(8 * shape.threads), "keys that are not sorted: {shape:?}");
                }
            }
        }
        // With a KiB for the system, and 512 bytes of other variables.
        let shape = SortShape::fitting(227 << 10, 65_536, 65_536);
        assert_eq!(shape.per_multiprocessor, 2);
        assert!(2 * (shape.shared_bytes() + 1024 + 512) <= 228 << 10, "{shape:?}");
    }
}
