use super::{Head, SparseRow};
use crate::config::{S2oConfig, TriggeringTile};
use crate::early_stop::{Gain, StopVote};
use crate::online_softmax::{RowUpdate, SoftmaxState};
use crate::plan::SegmentOrder;
use crate::segment::Segment;

/// Algorithm 3: query tiles in `q_perm` order resume their states and process the prefix in `kv_perm` order until the
/// gain is too small. `states` and the result follow the segment's rows in natural order. The visited prefix
/// tiles are in processing order.
pub fn pass2(
    head: &Head,
    segment: &Segment,
    mut states: Vec<SoftmaxState>,
    order: &SegmentOrder,
    config: &S2oConfig,
) -> (Vec<SparseRow>, Vec<usize>) {
    let mut skips = vec![false; states.len()];
    let visited = order
        .q_perm
        .as_slice()
        .chunks(config.tile_q())
        .map(|tile| {
            let mut tile_states: Vec<SoftmaxState> = tile.iter().map(|&i| states[i as usize].clone()).collect();
            let rows: Vec<usize> = tile.iter().map(|&i| segment.rows.start + i as usize).collect();
            let (visited, tile_skips) = prefix(head, &rows, &mut tile_states, order, config);
            for (&i, state) in tile.iter().zip(tile_states) {
                (states[i as usize], skips[i as usize]) = (state, tile_skips);
            }
            visited
        })
        .collect();
    (states.into_iter().zip(skips).map(|(state, skips)| SparseRow { state, skips }).collect(), visited)
}

/// The prefix loop of one query tile: the number of visited tiles, and whether it skips keys.
/// `states[i]` belongs to `rows[i]`.
pub(super) fn prefix(
    head: &Head,
    rows: &[usize],
    states: &mut [SoftmaxState],
    order: &SegmentOrder,
    config: &S2oConfig,
) -> (usize, bool) {
    let tiles = order.kv_perm.as_slice().chunks(config.tile_k());
    let total = tiles.len();
    let mut vote = StopVote::new(config, total);
    for (j, tile) in tiles.enumerate() {
        let scores: Vec<Vec<f64>> =
            rows.iter().map(|&row| tile.iter().map(|&t| head.score(row, t as usize)).collect()).collect();
        let updates: Vec<RowUpdate> = states.iter().zip(&scores).map(|(state, scores)| state.preview(scores)).collect();
        for update in &updates {
            vote.add(Gain::of(update, config.gain_frame()));
        }
        let stops = vote.stops();
        let keep = config.triggering_tile() == TriggeringTile::Keep;
        if !stops || keep {
            for (state, scores) in states.iter_mut().zip(&scores) {
                state.update(scores, |i| head.v(tile[i] as usize));
            }
        }
        if stops {
            let visited = j + 1;
            return (visited, !keep || visited < total);
        }
    }
    (total, false)
}
