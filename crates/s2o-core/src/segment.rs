//! Segments on absolute positions, their query tiles, and the number of tiles that dense attention computes.

use std::ops::Range;

use crate::config::S2oConfig;

/// The part of one segment `[n S, (n+1) S)` that holds queries of one call.
///
/// Window: keys from [`Segment::start`] to the query, dense and causal. Prefix: keys `0..start`, ranked, no mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Segment number `n` on absolute positions.
    pub index: usize,
    /// First position `n * S`, which is also the length of the prefix.
    pub start: usize,
    /// Queries of the call in this segment that are not in the dense tail, as rows of the call.
    pub rows: Range<usize>,
    /// Queries of the call in this segment that belong to the dense tail, as rows of the call.
    pub tail_rows: Range<usize>,
}

impl Segment {
    /// All queries of the call in this segment; their mean ranks the keys.
    pub fn all_rows(&self) -> Range<usize> {
        self.rows.start..self.tail_rows.end
    }

    /// Number of key tiles in the prefix.
    pub fn prefix_tiles(&self, tile_k: usize) -> usize {
        self.start / tile_k
    }

    /// The query tiles of [`Segment::rows`], cut on absolute positions. With `q_perm` they are cut from the first row,
    /// because a tile then holds permuted rows.
    pub fn ranked_tiles(&self, q_offset: usize, config: &S2oConfig) -> Vec<Range<usize>> {
        if config.q_perm() {
            query_tiles(self.rows.clone(), config.tile_q()).collect()
        } else {
            position_tiles(self.rows.clone(), q_offset, config.tile_q()).collect()
        }
    }

    /// Number of tiles that a pass over [`Segment::rows`] computed, windows included. `visited` has the
    /// prefix tiles of each of [`Segment::ranked_tiles`].
    pub(crate) fn computed_tiles(&self, visited: &[usize], q_offset: usize, config: &S2oConfig) -> usize {
        let tiles = self.ranked_tiles(q_offset, config);
        let window = |rows: &Range<usize>| causal_tiles(self.start, q_offset + rows.end - 1, config.tile_k());
        tiles.iter().zip(visited).map(|(rows, visited)| window(rows) + visited).sum()
    }
}

/// Cuts `q_len` queries that begin at position `q_offset` into segments of `segment_len`. Queries from position
/// `tail_start` belong to the dense tail. Returns only segments that hold queries, in order.
pub fn segments(q_offset: usize, q_len: usize, segment_len: usize, tail_start: usize) -> Vec<Segment> {
    let end = q_offset + q_len;
    (q_offset / segment_len..end.div_ceil(segment_len))
        .map(|index| {
            let start = index * segment_len;
            let row_start = start.max(q_offset) - q_offset;
            let row_end = (start + segment_len).min(end) - q_offset;
            let split = tail_start.saturating_sub(q_offset).clamp(row_start, row_end);
            Segment { index, start, rows: row_start..split, tail_rows: split..row_end }
        })
        .collect()
}

/// Cuts rows into query tiles of `tile_q` from the first row; the last tile may be ragged. The dense tail and permuted
/// queries use these tiles.
pub fn query_tiles(rows: Range<usize>, tile_q: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(tile_q).map(move |first| first..(first + tile_q).min(end))
}

/// Cuts rows, where row `i` is at position `q_offset + i`, at multiples of `tile_q` of the ABSOLUTE position, so that
/// chunks are cut in the same way as the whole prompt. The first tile is also ragged if a chunk begins inside a tile.
pub fn position_tiles(
    rows: Range<usize>,
    q_offset: usize,
    tile_q: usize,
) -> impl ExactSizeIterator<Item = Range<usize>> {
    let (first, end) = (q_offset + rows.start, q_offset + rows.end);
    let tiles = if rows.is_empty() { 0..0 } else { first / tile_q..end.div_ceil(tile_q) };
    tiles.map(move |tile| (tile * tile_q).max(first) - q_offset..((tile + 1) * tile_q).min(end) - q_offset)
}

/// Number of key tiles that cover the keys `start..=last`, for a query tile whose last query is at position `last`.
/// With `start` 0, this is the number that dense causal attention computes.
pub fn causal_tiles(start: usize, last: usize, tile_k: usize) -> usize {
    (last - start) / tile_k + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_may_start_inside_a_segment() {
        let cut = segments(300, 201, 128, 485);
        assert_eq!(cut.len(), 2);
        assert_eq!(cut[0], Segment { index: 2, start: 256, rows: 0..84, tail_rows: 84..84 });
        assert_eq!(cut[1], Segment { index: 3, start: 384, rows: 84..185, tail_rows: 185..201 });
    }

    #[test]
    fn the_tail_may_begin_before_or_after_the_call() {
        assert!(segments(700, 300, 128, 600).iter().all(|cut| cut.rows.is_empty()));
        assert!(segments(700, 300, 128, 1000).iter().all(|cut| cut.tail_rows.is_empty()));
    }

    #[test]
    fn tiles_cover_the_rows_once() {
        let tiles: Vec<_> = query_tiles(5..300, 128).collect();
        assert_eq!(tiles, [5..133, 133..261, 261..300]);
        assert_eq!(query_tiles(7..7, 128).len(), 0);
    }

    #[test]
    fn positions_cut_a_chunk_as_they_cut_the_whole() {
        let tiles: Vec<_> = position_tiles(0..300, 200, 128).collect();
        assert_eq!(tiles, [0..56, 56..184, 184..300]);
        assert!(position_tiles(3..9, 200, 128).eq(std::iter::once(3..9)));
        assert_eq!(position_tiles(0..128, 256, 128).len(), 1);
        assert_eq!(position_tiles(7..7, 200, 128).len(), 0);
    }

    #[test]
    fn computed_tiles_are_those_of_window_and_prefix() {
        // The rows 10..100 are at the positions 266..356, which lie in two query tiles.
        let segment = Segment { index: 2, start: 256, rows: 10..100, tail_rows: 100..100 };
        let config = S2oConfig::builder().tile_q(64).tile_k(32).build().unwrap();
        assert_eq!(segment.computed_tiles(&[3, 8], 256, &config), (2 + 3) + (4 + 8));
    }

    #[test]
    fn causal_tiles_count_the_diagonal() {
        assert_eq!(causal_tiles(0, 0, 128), 1);
        assert_eq!(causal_tiles(0, 127, 128), 1);
        assert_eq!(causal_tiles(0, 128, 128), 2);
        assert_eq!(causal_tiles(256, 400, 128), 2);
    }
}
