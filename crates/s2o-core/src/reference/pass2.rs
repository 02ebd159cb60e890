use super::Head;
use crate::config::{S2oConfig, TriggeringTile};
use crate::early_stop::{Gain, StopVote};
use crate::online_softmax::SoftmaxState;
use crate::plan::SegmentOrder;
use crate::segment::Segment;
use crate::stats::{SkippedMass, Visit};

/// Algorithm 3: query tiles in `q_perm` order resume their states and process the prefix in `kv_perm` order until the
/// gain is too small. `states` and the output (rows, head_dim) follow the segment's rows in natural order. The visits
/// are in processing order.
pub fn pass2(
    head: &Head,
    segment: &Segment,
    mut states: Vec<SoftmaxState>,
    order: &SegmentOrder,
    config: &S2oConfig,
) -> (Vec<f64>, Vec<Visit>) {
    let visits = order
        .q_perm
        .as_slice()
        .chunks(config.tile_q())
        .map(|tile| {
            let mut tile_states: Vec<SoftmaxState> = tile.iter().map(|&i| states[i as usize].clone()).collect();
            let rows: Vec<usize> = tile.iter().map(|&i| segment.rows.start + i as usize).collect();
            let visit = prefix(head, &rows, &mut tile_states, order, config);
            for (&i, state) in tile.iter().zip(tile_states) {
                states[i as usize] = state;
            }
            visit
        })
        .collect();
    (states.iter().flat_map(SoftmaxState::finish).collect(), visits)
}

/// The prefix loop of one query tile. `states[i]` belongs to `rows[i]`.
pub(super) fn prefix(
    head: &Head,
    rows: &[usize],
    states: &mut [SoftmaxState],
    order: &SegmentOrder,
    config: &S2oConfig,
) -> Visit {
    let before: Vec<SoftmaxState> = states.to_vec();
    let tiles = order.kv_perm.as_slice().chunks(config.tile_k());
    let total = tiles.len();
    for (j, tile) in tiles.enumerate() {
        let scores: Vec<Vec<f64>> =
            rows.iter().map(|&row| tile.iter().map(|&t| head.score(row, t as usize)).collect()).collect();
        let mut vote = StopVote::new(config);
        for (state, scores) in states.iter().zip(&scores) {
            vote.add(Gain::of(&state.preview(scores), config.gain_frame()));
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
            let share = states.iter().zip(&before).map(|(now, then)| prefix_share(now, then)).sum::<f64>();
            let skipped_mass = SkippedMass::estimate(
                vote.mean_ratio(),
                total - visited + usize::from(!keep),
                share / rows.len() as f64,
                order.unvisited_over_visited(visited - usize::from(!keep)),
            );
            return Visit { visited, skipped_mass: Some(skipped_mass) };
        }
    }
    Visit::all(total)
}

/// Share of a row's mass that came from the prefix.
fn prefix_share(now: &SoftmaxState, window: &SoftmaxState) -> f64 {
    1.0 - window.row_sum * (window.row_max - now.row_max).exp() / now.row_sum
}
