//! The contiguous pass: keys in natural order, causal or not. The local window of Algorithm 2, and dense attention.

use std::ops::Range;

use super::strided::{Element, Inputs};
use super::tile::Workspace;

/// Loads query tiles, given as consecutive ranges of rows, and runs them over the keys from `start`, `tile_k` at a time:
/// up to each query's own position if `causal`, else over all. They lie in the first of `workspace.tiles`.
pub(super) fn contiguous<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, head): (usize, usize),
    cut: &[Range<usize>],
    start: usize,
    causal: bool,
    tile_k: usize,
    workspace: &mut Workspace,
) {
    let shape = inputs.shape;
    let (head_dim, q_offset, kv_head) = (shape.head_dim(), shape.q_offset(), shape.kv_head(head));
    let Workspace { tiles, scores, keys, values, rows: row_buffer, .. } = workspace;
    let tiles = Workspace::at_least(tiles, cut.len());
    for (tile, rows) in tiles.iter_mut().zip(cut) {
        tile.load(inputs, (batch, head), rows.clone(), row_buffer);
    }
    let row_end = cut.last().map_or(0, |rows| rows.end);
    let end = if causal { q_offset + row_end } else { shape.k_len() };
    for first in (start..end).step_by(tile_k) {
        let positions = first..(first + tile_k).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), keys);
        let values = inputs.v.gather((batch, kv_head), positions, values);
        for tile in tiles.iter_mut() {
            let (first_row, last_row) = (tile.rows[0], tile.rows[tile.rows.len() - 1]);
            // Keys that this tile can see: what it computes must not depend on the tiles it shares an item with.
            let seen = if causal { (q_offset + last_row + 1).saturating_sub(first) } else { usize::MAX };
            if seen == 0 {
                continue;
            }
            let len = keys.len().min(seen.saturating_mul(head_dim));
            let diagonal = causal.then_some((q_offset + first_row) as isize - first as isize);
            tile.score(&keys[..len], diagonal, scores);
            tile.update(scores, &values[..len]);
        }
    }
}
