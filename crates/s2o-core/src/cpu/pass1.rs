//! Pass 1 (Algorithm 2): keys in natural order, causal or not. It computes the local window and dense attention.

use std::ops::Range;

use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::shape::Mask;

/// Loads the query tiles `cut` (consecutive ranges of rows) and updates them with the keys from `start`, `tile_k` at a
/// time, each query with the keys that `mask` lets it see. The tiles are the first in `workspace.tiles`.
pub(super) fn pass1<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, head): (usize, usize),
    cut: &[Range<usize>],
    start: usize,
    mask: Mask,
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
    let end = if mask.is_causal() { q_offset + row_end } else { shape.k_len() };
    for first in (start..end).step_by(tile_k) {
        let positions = first..(first + tile_k).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), keys);
        let values = inputs.v.gather((batch, kv_head), positions, values);
        for tile in tiles.iter_mut() {
            let (first_row, last_row) = (tile.rows[0], tile.rows[tile.rows.len() - 1]);
            // Only the keys that this tile can see: its result must not depend on the other tiles of the run.
            let seen = if mask.is_causal() { (q_offset + last_row + 1).saturating_sub(first) } else { usize::MAX };
            if seen == 0 {
                continue;
            }
            let len = keys.len().min(seen.saturating_mul(head_dim));
            let diagonal = mask.is_causal().then_some((q_offset + first_row) as isize - first as isize);
            tile.score(&keys[..len], diagonal, scores);
            tile.update(scores, &values[..len]);
        }
    }
}
