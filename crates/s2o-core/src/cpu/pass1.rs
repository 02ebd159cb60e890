//! Pass 1 (Algorithm 2): keys in natural order, causal or not. It computes the local window and dense attention.

use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::shape::Mask;

/// Updates the first `count` tiles of the workspace, whose rows ascend, with the keys from `start`, `tile_k` at a time,
/// each query with the keys that `mask` lets it see. All rows must see the first key.
pub(super) fn pass1<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, kv_head): (usize, usize),
    start: usize,
    mask: Mask,
    tile_k: usize,
    workspace: &mut Workspace,
    count: usize,
) {
    let shape = inputs.shape;
    let (head_dim, q_offset) = (shape.head_dim(), shape.q_offset());
    let Workspace { tiles, scores, keys, values, .. } = workspace;
    let tiles = &mut tiles[..count];
    let row_end = tiles.iter().map(|tile| tile.last_row() + 1).max().unwrap_or(0);
    let end = if mask.is_causal() { q_offset + row_end } else { shape.k_len() };
    for first in (start..end).step_by(tile_k) {
        let positions = first..(first + tile_k).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), keys);
        let values = inputs.v.gather((batch, kv_head), positions, values);
        for tile in tiles.iter_mut() {
            // Only the keys that this tile can see: its result must not depend on the other tiles of the run.
            let seen =
                if mask.is_causal() { (q_offset + tile.last_row() + 1).saturating_sub(first) } else { usize::MAX };
            if seen == 0 {
                continue;
            }
            let len = keys.len().min(seen.saturating_mul(head_dim));
            let first_row = mask.is_causal().then_some(first as isize - q_offset as isize);
            tile.score(&keys[..len], first_row, scores);
            tile.update(scores, &values[..len]);
        }
    }
}
