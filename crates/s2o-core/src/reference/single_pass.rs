use super::{Head, SparseRow, pass1, pass2};
use crate::config::S2oConfig;
use crate::online_softmax::SoftmaxState;
use crate::plan::SegmentOrder;
use crate::segment::Segment;

/// Algorithm 4: without query permutation, each query tile processes its window and then its prefix, so no state leaves
/// the loop. The rows are in natural order.
pub fn single_pass(
    head: &Head,
    segment: &Segment,
    order: &SegmentOrder,
    config: &S2oConfig,
) -> (Vec<SparseRow>, Vec<usize>) {
    let mut out = Vec::with_capacity(segment.rows.len());
    let mut visited_tiles = Vec::new();
    for rows in segment.ranked_tiles(head.q_offset(), config) {
        let mut states: Vec<SoftmaxState> =
            rows.clone().map(|row| pass1::window(head, segment, row, config.tile_k())).collect();
        let rows: Vec<usize> = rows.collect();
        let (visited, skips) = pass2::prefix(head, &rows, &mut states, order, config);
        visited_tiles.push(visited);
        out.extend(states.into_iter().map(|state| SparseRow { state, skips }));
    }
    (out, visited_tiles)
}
