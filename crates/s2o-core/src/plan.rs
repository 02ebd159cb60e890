//! [`Plan`]: the segments of one call, or the decision to use the dense path. All backends start from a plan.

use crate::config::S2oConfig;
use crate::error::S2oError;
use crate::permutation::{Permutation, PermutationError};
use crate::probes::ProbeStats;
use crate::segment::{Segment, position_tiles, query_tiles, segments};
use crate::shape::AttnShape;
use crate::stats::{AttnStats, HeadStats, TileStats};

/// The segments of one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Number of tokens of the whole prompt, of which the call may be a chunk.
    pub prompt_len: usize,
    /// Number of tokens in a segment.
    pub segment_len: usize,
    /// The segments that hold queries of the call, in order. Empty if the call uses the dense path.
    pub segments: Vec<Segment>,
    /// One query in so many positions is an exact probe; `None` without probes.
    pub probe_stride: Option<usize>,
}

impl Plan {
    /// Cuts a call into segments. `prompt_len`, the length of the whole prompt in tokens, determines the segment length
    /// and the start of the dense tail, so that all chunks of a prompt are cut in the same way as the whole prompt.
    /// Prompts shorter than `break_even` are dense under [`DenseBelow::Auto`](crate::DenseBelow::Auto).
    ///
    /// # Errors
    /// [`S2oError::PromptShorterThanKeys`] if the call's keys reach beyond the prompt.
    pub fn new(config: &S2oConfig, shape: &AttnShape, prompt_len: usize, break_even: usize) -> Result<Self, S2oError> {
        if prompt_len < shape.k_len() {
            return Err(S2oError::PromptShorterThanKeys { k_len: shape.k_len(), got: prompt_len });
        }
        let segment_len = config.segment_len().resolve(prompt_len);
        let segments = if prompt_len < config.dense_below().resolve(break_even) {
            Vec::new()
        } else {
            let tail_start = prompt_len.saturating_sub(config.dense_tail().resolve(prompt_len));
            segments(shape.q_offset(), shape.q_len(), segment_len, tail_start)
        };
        let probe_stride = config.probe_stride().resolve(prompt_len, segment_len, config.max_error().is_some());
        Ok(Self { prompt_len, segment_len, segments, probe_stride })
    }

    /// Checks that orders given by a caller fit the call's heads and segments.
    ///
    /// # Errors
    /// [`PermutationError::Length`] if a number of heads, segments, keys or queries differs.
    pub fn check_ranking(&self, shape: &AttnShape, ranking: &Ranking) -> Result<(), PermutationError> {
        same_len(shape.batch() * shape.num_heads(), ranking.len())?;
        for orders in ranking {
            same_len(self.segments.len(), orders.len())?;
            self.segments.iter().zip(orders).try_for_each(|(segment, order)| order.check(segment))?;
        }
        Ok(())
    }

    /// Number of rows of the call before the dense tail, or 0 if the call uses the dense path.
    pub fn ranked_rows(&self) -> usize {
        self.segments.iter().rev().find(|segment| !segment.rows.is_empty()).map_or(0, |segment| segment.rows.end)
    }

    /// The statistics of a call. `visited(head, segment, tile)` is the number of prefix tiles that the `tile`-th query
    /// tile outside the dense tail computed, in the plan's `segment`-th segment for head `b * num_heads + h`. `probes`
    /// is empty or has a list for each such head.
    pub fn stats(
        &self,
        shape: &AttnShape,
        config: &S2oConfig,
        visited: impl Fn(usize, usize, usize) -> usize,
        mut probes: Vec<Vec<ProbeStats>>,
    ) -> AttnStats {
        let (q_offset, tile_q, tile_k) = (shape.q_offset(), config.tile_q(), config.tile_k());
        let mut head_stats = |head: usize| {
            let mut tiles = Vec::new();
            if self.is_dense() {
                // One segment with all keys in its window.
                let whole = Segment { index: 0, start: 0, rows: 0..shape.q_len(), tail_rows: 0..0 };
                tiles.extend(
                    position_tiles(0..shape.q_len(), q_offset, tile_q)
                        .map(|rows| TileStats::new(&whole, rows, q_offset, tile_k, 0)),
                );
            }
            for (s, segment) in self.segments.iter().enumerate() {
                let all = segment.prefix_tiles(tile_k);
                let tail = query_tiles(segment.tail_rows.clone(), tile_q).map(|rows| (rows, all));
                let ranked = segment.ranked_tiles(q_offset, config).into_iter().enumerate();
                let ranked = ranked.map(|(tile, rows)| (rows, visited(head, s, tile)));
                let stats = |(rows, visited)| TileStats::new(segment, rows, q_offset, tile_k, visited);
                tiles.extend(tail.chain(ranked).map(stats));
            }
            HeadStats { tiles, probes: probes.get_mut(head).map(std::mem::take).unwrap_or_default() }
        };
        let heads = (0..shape.batch() * shape.num_heads()).map(&mut head_stats).collect();
        AttnStats { num_heads: shape.num_heads(), heads }
    }

    /// Whether the call uses the dense path.
    pub fn is_dense(&self) -> bool {
        self.segments.is_empty()
    }
}

/// The orders of one segment for one query head (Algorithm 1).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SegmentOrder {
    /// Order of the segment's queries outside the dense tail, counted from the first of them.
    pub q_perm: Permutation,
    /// Order of the keys `0..segment.start`.
    pub kv_perm: Permutation,
}

impl SegmentOrder {
    /// Checks the lengths against a segment.
    ///
    /// # Errors
    /// [`PermutationError::Length`] if a length differs.
    pub fn check(&self, segment: &Segment) -> Result<(), PermutationError> {
        same_len(segment.start, self.kv_perm.len())?;
        same_len(segment.rows.len(), self.q_perm.len())
    }
}

fn same_len(expected: usize, got: usize) -> Result<(), PermutationError> {
    if expected == got { Ok(()) } else { Err(PermutationError::Length { expected, got }) }
}

/// The orders of a whole call: `ranking[b * num_heads + h][s]` belongs to the `s`-th segment of the [`Plan`].
pub type Ranking = Vec<Vec<SegmentOrder>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SegmentLen;

    #[test]
    fn rows_before_the_dense_tail_are_ranked() {
        let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_tail(100).build().unwrap();
        // The tail of a prompt of 1000 tokens begins at position 900.
        let ranked = |q_len, k_len, break_even| {
            let shape = AttnShape::new([1, q_len, 1, 64], [k_len, 1]).unwrap();
            Plan::new(&config, &shape, 1000, break_even).unwrap().ranked_rows()
        };
        assert_eq!([ranked(1000, 1000, 0), ranked(300, 1000, 0), ranked(50, 1000, 0)], [900, 200, 0]);
        assert_eq!([ranked(600, 600, 0), ranked(300, 600, 0)], [600, 300]);
        // The dense path ranks nothing.
        assert_eq!(ranked(1000, 1000, 1001), 0);
    }
}
