//! Pass 2 (Algorithm 3): prefix keys by index in descending estimated importance, until the gain is too small.

use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::config::{S2oConfig, TriggeringTile};
use crate::early_stop::StopVote;
use crate::plan::SegmentOrder;

/// Regroups the first `count` tiles, which are all tiles of a segment, by `order.q_perm`, including their states.
pub(super) fn permute(workspace: &mut Workspace, count: usize, order: &SegmentOrder, tile_q: usize) {
    let Workspace { tiles, permuted, .. } = workspace;
    let cut = order.q_perm.as_slice().chunks(tile_q);
    for (tile, members) in Workspace::at_least(permuted, count).iter_mut().zip(cut) {
        tile.resume(members.len(), |i| {
            let row = members[i] as usize;
            (&tiles[row / tile_q], row % tile_q)
        });
    }
    std::mem::swap(tiles, permuted);
}

/// Updates the first `count` tiles of the workspace, all of one segment, with the prefix in `order.kv_perm` order. `at`
/// is the sequence and the KV head. The tiles share each gathered key tile and stop independently.
pub(super) fn pass2<T: Element>(
    inputs: &Inputs<'_, T>,
    at: (usize, usize),
    order: &SegmentOrder,
    config: &S2oConfig,
    workspace: &mut Workspace,
    count: usize,
) -> Vec<usize> {
    let keep = config.triggering_tile() == TriggeringTile::Keep;
    let Workspace { tiles, scores, keys, values, .. } = workspace;
    let tiles = &mut tiles[..count];
    let key_tiles = order.kv_perm.as_slice().chunks(config.tile_k());
    let total = key_tiles.len();
    let mut visited = vec![total; count];
    let mut votes = vec![StopVote::new(config, total); count];
    let mut running: Vec<usize> = (0..count).collect();
    for (j, positions) in key_tiles.enumerate() {
        if running.is_empty() {
            break;
        }
        let positions = positions.iter().map(|&t| t as usize);
        let keys = inputs.k.gather(at, positions.clone(), keys);
        let values = inputs.v.gather(at, positions, values);
        running.retain(|&i| {
            let tile = &mut tiles[i];
            tile.score(keys, None, scores);
            tile.vote(scores, config.gain_frame(), &mut votes[i]);
            let stops = votes[i].stops();
            if keep || !stops {
                tile.update(scores, values);
            }
            if stops {
                visited[i] = j + 1;
                tile.skips = visited[i] < total || !keep;
            }
            !stops
        });
    }
    visited
}
