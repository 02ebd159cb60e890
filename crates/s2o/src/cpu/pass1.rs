//! The contiguous pass: keys in natural order, causal or not. The local window of Algorithm 2, and dense attention.

use std::ops::Range;

use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::segment::query_tiles;

/// Loads the query tiles that `rows` are cut into and runs them over the keys from `start`: up to each query's own
/// position if `causal`, else over all. Returns how many tiles of `workspace.tiles` are in use.
pub(super) fn contiguous<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, head): (usize, usize),
    rows: Range<usize>,
    start: usize,
    causal: bool,
    (tile_q, tile_k): (usize, usize),
    workspace: &mut Workspace,
) -> usize {
    let shape = inputs.shape;
    let (head_dim, kv_offset, kv_head) = (shape.head_dim(), shape.kv_offset(), shape.kv_head(head));
    let cut = query_tiles(rows.clone(), tile_q);
    let count = cut.len();
    let Workspace { tiles, scores, keys, values, rows: row_buffer, .. } = workspace;
    let tiles = Workspace::at_least(tiles, count);
    for (tile, rows) in tiles.iter_mut().zip(cut) {
        tile.load(inputs, (batch, head), rows, row_buffer);
    }
    let end = if causal { kv_offset + rows.end } else { shape.k_len() };
    for first in (start..end).step_by(tile_k) {
        let positions = first..(first + tile_k).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), keys);
        let values = inputs.v.gather((batch, kv_head), positions, values);
        for tile in tiles.iter_mut() {
            let (first_row, last_row) = (tile.rows[0], tile.rows[tile.rows.len() - 1]);
            // Keys that this tile can see: what it computes must not depend on the tiles it shares an item with.
            let seen = if causal { (kv_offset + last_row + 1).saturating_sub(first) } else { usize::MAX };
            if seen == 0 {
                continue;
            }
            let len = keys.len().min(seen.saturating_mul(head_dim));
            let diagonal = causal.then_some((kv_offset + first_row) as isize - first as isize);
            tile.score(&keys[..len], diagonal, scores);
            tile.update(scores, &values[..len]);
        }
    }
    count
}
