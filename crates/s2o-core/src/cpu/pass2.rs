//! The ranked pass: prefix keys by index in descending estimated importance, until the gain is too small.

use super::strided::{Element, Inputs};
use super::tile::{QueryTile, Workspace};
use crate::config::{S2oConfig, TriggeringTile};
use crate::early_stop::StopVote;
use crate::plan::SegmentOrder;
use crate::stats::SkippedMass;

/// Prefix tiles that one query tile computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visit {
    pub(super) visited: usize,
    pub(super) skipped_mass: SkippedMass,
}

/// Regroups the tiles of a whole segment by `order.q_perm`, states and all, into `workspace.permuted`. Returns how
/// many tiles there are.
pub(super) fn permute(workspace: &mut Workspace, count: usize, order: &SegmentOrder, tile_q: usize) -> usize {
    let natural = &workspace.tiles[..count];
    let cut = order.q_perm.as_slice().chunks(tile_q);
    let permuted = Workspace::at_least(&mut workspace.permuted, cut.len());
    for (tile, members) in permuted.iter_mut().zip(cut) {
        tile.resume(members.len(), |i| {
            let row = members[i] as usize;
            (&natural[row / tile_q], row % tile_q)
        });
    }
    permuted.len()
}

/// Runs query tiles of one segment over the prefix in `order.kv_perm` order. They share each gathered key tile, and
/// stop one by one.
pub(super) fn ranked<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, head): (usize, usize),
    order: &SegmentOrder,
    config: &S2oConfig,
    workspace: &mut Workspace,
    count: usize,
) -> Vec<Visit> {
    let at = (batch, inputs.shape.kv_head(head));
    let keep = config.triggering_tile() == TriggeringTile::Keep;
    let Workspace { tiles, permuted, scores, keys, values, .. } = workspace;
    let tiles = if config.q_perm() { &mut permuted[..count] } else { &mut tiles[..count] };
    let key_tiles = order.kv_perm.as_slice().chunks(config.tile_k());
    let total = key_tiles.len();
    let mut visits = vec![Visit { visited: total, skipped_mass: SkippedMass::default() }; count];
    let mut running: Vec<usize> = (0..count).collect();
    tiles.iter_mut().for_each(QueryTile::enter_prefix);
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
            let mut vote = StopVote::new(config);
            tile.vote(scores, config.gain_frame(), &mut vote);
            let stops = vote.stops();
            if keep || !stops {
                tile.update(scores, values);
            }
            if stops {
                let visited = j + 1;
                visits[i] = Visit {
                    visited,
                    skipped_mass: SkippedMass::estimate(
                        vote.mean_ratio(),
                        total - visited + usize::from(!keep),
                        tile.prefix_share(),
                        order.unvisited_over_visited(visited - usize::from(!keep)),
                    ),
                };
            }
            !stops
        });
    }
    visits
}
