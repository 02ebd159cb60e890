//! [`TileRun`]: the query tiles that one worker computes at a time, from their first key to their output.

use std::ops::Range;

use super::microkernel::OutputRows;
use super::pass1::pass1;
use super::pass2::{pass2, permute};
use super::probes::{SparseRows, prefix_score};
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::config::S2oConfig;
use crate::plan::SegmentOrder;
use crate::segment::Segment;
use crate::shape::Mask;

/// Number of query tiles in a run. The tiles share gathered keys and their states should fit the L2 cache, but every
/// thread should get several runs.
pub(super) fn tiles_per_run(head_dim: usize, tile_q: usize, total_tiles: usize) -> usize {
    const STATE_BYTES: usize = 512 << 10;
    let per_tile = 2 * head_dim * tile_q * size_of::<f32>();
    let runs_wanted = 4 * rayon::current_num_threads();
    (STATE_BYTES / per_tile).min(total_tiles / runs_wanted).max(1)
}

/// Consecutive query tiles of one segment and head.
pub(super) struct TileRun<'a> {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) segment: &'a Segment,
    /// Rows of the call.
    pub(super) tiles: Vec<Range<usize>>,
    /// `None` for the dense tail.
    pub(super) order: Option<&'a SegmentOrder>,
}

impl TileRun<'_> {
    /// Computes the tiles and writes their rows: in a single pass (Algorithm 4), or with the queries regrouped between
    /// two passes (Algorithms 2 and 3). Tiles of the dense tail process their prefix in natural order, as a window, and
    /// have no counts. With probes, the result has the rows outside the dense tail.
    pub(super) fn compute<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        config: &S2oConfig,
        has_probes: bool,
        workspace: &mut Workspace,
        out: &OutputRows<'_, T>,
    ) -> (Vec<usize>, SparseRows) {
        let at = (self.batch, inputs.shape.kv_head(self.head));
        let (count, tile_k) = (self.tiles.len(), config.tile_k());
        let window_start = if self.order.is_some() { self.segment.start } else { 0 };
        workspace.load(inputs, (self.batch, self.head), &self.tiles);
        pass1(inputs, at, window_start, Mask::Causal, tile_k, workspace, count);
        let visited = match self.order {
            None => Vec::new(),
            Some(order) => {
                if config.q_perm() {
                    permute(workspace, count, order, config.tile_q());
                }
                pass2(inputs, at, order, config, workspace, count)
            }
        };
        let keeps_rows = has_probes && self.order.is_some();
        let tiles = &workspace.tiles[..count];
        let mut keys = (keeps_rows && tiles.iter().any(|tile| tile.skips))
            .then(|| (prefix_score(inputs, at, self.segment.start), vec![0.0; inputs.shape.head_dim()]));
        let mut rows = SparseRows::default();
        for tile in tiles {
            tile.finish(&mut workspace.rows, |lane, values| {
                let row = tile.rows[lane];
                out.write(inputs.output_row(self.batch, row, self.head), |dst| T::narrow(values, dst));
                if keeps_rows {
                    let query = keys.as_mut().filter(|_| tile.skips).map(|(keys, query)| {
                        inputs.q.read(self.batch, row, self.head, query);
                        (&*keys, &query[..])
                    });
                    rows.add(tile, lane, query, values);
                }
            });
        }
        (visited, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_shrink_when_there_is_little_work() {
        assert_eq!(tiles_per_run(128, 128, 1), 1);
        assert_eq!(tiles_per_run(128, 128, 1 << 20), 4);
        assert_eq!(tiles_per_run(64, 64, 1 << 20), 16);
    }
}
