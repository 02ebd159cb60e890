use super::Head;
use crate::online_softmax::SoftmaxState;
use crate::segment::Segment;

/// Algorithm 2: causal attention of each query outside the dense tail over its own segment, as a state to resume.
pub fn pass1(head: &Head, segment: &Segment, tile_k: usize) -> Vec<SoftmaxState> {
    segment.rows.clone().map(|row| window(head, segment, row, tile_k)).collect()
}

/// The state of one query after its local window.
pub(super) fn window(head: &Head, segment: &Segment, row: usize, tile_k: usize) -> SoftmaxState {
    let mut state = SoftmaxState::empty(head.head_dim);
    let end = head.position(row) + 1;
    for first in (segment.start..end).step_by(tile_k) {
        let keys = first..(first + tile_k).min(end);
        let scores: Vec<f64> = keys.map(|t| head.score(row, t)).collect();
        state.update(&scores, |i| head.v(first + i));
    }
    state
}
