//! Statistics of the computed and the skipped tiles of an attention call, per head.

use std::ops::Range;

use crate::probes::ProbeStats;
use crate::segment::{Segment, causal_tiles};

/// Statistics of one query tile of one head.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TileStats {
    /// Segment number, on absolute positions.
    pub segment: usize,
    /// Whether the tile belongs to the dense tail.
    pub dense_tail: bool,
    /// Number of queries in the tile.
    pub rows: usize,
    /// Number of key tiles in the causal window of the rows, in natural order.
    pub window_tiles: usize,
    /// Number of key tiles in the prefix.
    pub prefix_tiles: usize,
    /// Number of computed prefix tiles, including the tile that triggered the stop.
    pub visited: usize,
}

// The documentation of `cpu` and of candle-s2o's ops states this size.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<TileStats>() == 48);

impl TileStats {
    /// Statistics of the query tile `rows` of `segment`, which computed `visited` prefix tiles, in a call whose first
    /// query is at position `q_offset`.
    pub(crate) fn new(segment: &Segment, rows: Range<usize>, q_offset: usize, tile_k: usize, visited: usize) -> Self {
        Self {
            segment: segment.index,
            dense_tail: segment.tail_rows.contains(&rows.start),
            rows: rows.len(),
            window_tiles: causal_tiles(segment.start, q_offset + rows.end - 1, tile_k),
            prefix_tiles: segment.prefix_tiles(tile_k),
            visited,
        }
    }
}

/// Statistics of one query head of one sequence.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HeadStats {
    /// Query tiles in the order of their segments. In a segment, the tiles of the dense tail come first.
    pub tiles: Vec<TileStats>,
    /// What the probes of each segment measured; empty without probes.
    pub probes: Vec<ProbeStats>,
}

impl HeadStats {
    /// Number of tiles that dense causal attention computes.
    pub fn tiles_causal(&self) -> usize {
        self.tiles.iter().map(|t| t.window_tiles + t.prefix_tiles).sum()
    }

    /// Number of visited tiles, including the local windows and the triggering tiles.
    pub fn tiles_visited(&self) -> usize {
        self.tiles.iter().map(|t| t.window_tiles + t.visited).sum()
    }

    /// Number of computed tiles: the visited ones and the work of the probes.
    pub fn tiles_computed(&self) -> f64 {
        self.tiles_visited() as f64 + self.probes.iter().map(|probes| probes.tiles).sum::<f64>()
    }

    /// Ratio of computed tiles to causal tiles.
    pub fn density(&self) -> f64 {
        ratio(self.tiles_computed(), self.tiles_causal())
    }

    /// Share of the visited tiles that belong to local windows, in `[0, 1]`.
    pub fn local_window_share(&self) -> f64 {
        ratio(self.tiles.iter().map(|t| t.window_tiles as f64).sum(), self.tiles_visited())
    }

    /// Mean number of prefix tiles that a query tile outside the dense tail visited.
    pub fn mean_visited(&self) -> f64 {
        let ranked = self.tiles.iter().filter(|t| !t.dense_tail && t.prefix_tiles > 0);
        ratio(ranked.clone().map(|t| t.visited as f64).sum(), ranked.count().max(1))
    }
}

/// Statistics of a whole call.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AttnStats {
    /// Number of query heads per sequence.
    pub num_heads: usize,
    /// Statistics of each head: `heads[b * num_heads + h]`.
    pub heads: Vec<HeadStats>,
}

impl AttnStats {
    /// Number of tiles that dense causal attention computes.
    pub fn tiles_causal(&self) -> usize {
        self.heads.iter().map(HeadStats::tiles_causal).sum()
    }

    /// Number of computed tiles.
    pub fn tiles_computed(&self) -> f64 {
        self.heads.iter().map(HeadStats::tiles_computed).sum()
    }

    /// Ratio of computed tiles to causal tiles.
    pub fn density(&self) -> f64 {
        Self::joint_density([self])
    }

    /// Density of several calls together, such as the layers of a model.
    pub fn joint_density<'s>(calls: impl IntoIterator<Item = &'s Self>) -> f64 {
        let (computed, causal) = calls.into_iter().fold((0.0, 0), |(computed, causal), call| {
            (computed + call.tiles_computed(), causal + call.tiles_causal())
        });
        ratio(computed, causal)
    }

    /// What the probes of all heads and segments measured; `None` without probes.
    pub fn probes(&self) -> Option<ProbeStats> {
        self.heads.iter().flat_map(|head| &head.probes).copied().reduce(ProbeStats::plus)
    }

    /// Statistics of the heads of several calls on the same tokens, such as those of several GPUs that share the heads: the
    /// heads of the first come first in each sequence.
    pub fn of_all_heads(calls: &[Self]) -> Self {
        let num_heads = calls.iter().map(|call| call.num_heads).sum();
        let sequences = calls.iter().map(|call| call.heads.len() / call.num_heads.max(1)).max().unwrap_or(0);
        let of_sequence = |sequence: usize| {
            calls.iter().flat_map(move |call| call.heads.chunks(call.num_heads.max(1)).nth(sequence)).flatten().cloned()
        };
        Self { num_heads, heads: (0..sequences).flat_map(of_sequence).collect() }
    }

    /// These statistics with the heads in another order: group `i` of consecutive heads is the one at `slots[i]` here, and all
    /// groups have the same size.
    pub fn in_order(&self, slots: &[usize]) -> Self {
        let group = self.num_heads / slots.len().max(1);
        let of_sequence = |heads: &[HeadStats]| -> Vec<HeadStats> {
            slots.iter().flat_map(|slot| &heads[slot * group..][..group]).cloned().collect()
        };
        Self {
            num_heads: self.num_heads,
            heads: self.heads.chunks(self.num_heads.max(1)).flat_map(of_sequence).collect(),
        }
    }

    /// Appends the query tiles of a later chunk of the same prompt.
    pub fn append(&mut self, chunk: Self) {
        self.num_heads = chunk.num_heads;
        self.heads.resize_with(chunk.heads.len().max(self.heads.len()), HeadStats::default);
        for (head, more) in self.heads.iter_mut().zip(chunk.heads) {
            head.tiles.extend(more.tiles);
            for part in more.probes {
                match head.probes.last_mut() {
                    // A chunk may end inside a segment.
                    Some(last) if last.segment == part.segment => *last = last.plus(part),
                    _ => head.probes.push(part),
                }
            }
        }
    }
}

fn ratio(part: f64, whole: usize) -> f64 {
    if whole == 0 { 1.0 } else { part / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(window_tiles: usize, prefix_tiles: usize, visited: usize) -> TileStats {
        TileStats { segment: 0, dense_tail: false, rows: 128, window_tiles, prefix_tiles, visited }
    }

    fn head_stats(tiles: Vec<TileStats>) -> HeadStats {
        HeadStats { tiles, probes: Vec::new() }
    }

    #[test]
    fn density_counts_window_and_visited_over_causal() {
        let head = head_stats(vec![tile(1, 0, 0), tile(2, 8, 3), tile(1, 8, 1)]);
        assert_eq!(head.tiles_causal(), 20);
        assert_eq!(head.tiles_visited(), 8);
        assert_eq!(head.density(), 0.4);
        assert_eq!(head.local_window_share(), 0.5);
        assert_eq!(head.mean_visited(), 2.0);
    }

    #[test]
    fn the_window_alone_is_the_papers_sparsity_at_128k() {
        // "local window only" at 128K with S 2048 and tiles of 128: sparsity 0.983 in the paper.
        let tiles = (0..1024).map(|q| tile(q % 16 + 1, q / 16 * 16, 0)).collect();
        let stats = AttnStats { num_heads: 1, heads: vec![head_stats(tiles)] };
        assert!((1.0 - stats.density() - 0.9834).abs() < 5e-5, "{}", stats.density());
    }

    #[test]
    fn heads_of_several_calls_are_joined_by_sequence() {
        let call = |num_heads: usize, first: usize| AttnStats {
            num_heads,
            heads: (0..2 * num_heads).map(|i| head_stats(vec![tile(1, 0, first + i)])).collect(),
        };
        let all = AttnStats::of_all_heads(&[call(2, 10), call(1, 20)]);
        let visited: Vec<usize> = all.heads.iter().map(|head| head.tiles[0].visited).collect();
        assert_eq!((all.num_heads, visited), (3, vec![10, 11, 20, 12, 13, 21]));
        assert_eq!(AttnStats::of_all_heads(&[]), AttnStats::default());
    }

    #[test]
    fn groups_of_heads_change_places_in_every_sequence() {
        let heads = (0..12).map(|i| head_stats(vec![tile(1, 0, i)])).collect();
        let ordered = AttnStats { num_heads: 6, heads }.in_order(&[2, 0, 1]);
        let visited: Vec<usize> = ordered.heads.iter().map(|head| head.tiles[0].visited).collect();
        assert_eq!((ordered.num_heads, visited), (6, vec![4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9]));
    }

    #[test]
    fn chunks_append_head_by_head() {
        let chunk = AttnStats { num_heads: 2, heads: vec![head_stats(vec![tile(1, 1, 1)]); 2] };
        let mut all = AttnStats::default();
        all.append(chunk.clone());
        all.append(chunk);
        assert_eq!((all.heads.len(), all.tiles_causal()), (2, 8));
    }
}
