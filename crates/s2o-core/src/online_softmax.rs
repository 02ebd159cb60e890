//! [`SoftmaxState`]: the running softmax of one query (m, l, acc), in f64.

/// Running softmax of one query over the keys seen so far.
///
/// `row_max` is the largest scaled score (m), `row_sum` is `sum exp(s - m)` (l), and `acc` is `sum exp(s - m) v`, not
/// yet divided by `row_sum`. The state of no keys is `(-inf, 0, 0)`.
#[derive(Debug, Clone, PartialEq)]
pub struct SoftmaxState {
    /// m, in natural-log units of the scaled score.
    pub row_max: f64,
    /// The sum l.
    pub row_sum: f64,
    /// acc, `head_dim` elements.
    pub acc: Vec<f64>,
}

/// The effect of one key tile on the (m, l) of one query, before the tile is added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowUpdate {
    /// m', the maximum after the tile.
    pub new_max: f64,
    /// `exp(m - m')`, the factor that moves the state so far to the new frame.
    pub rescale: f64,
    /// l before the tile, in the frame of m.
    pub old_sum: f64,
    /// `sum exp(s - m')` over the tile.
    pub tile_sum: f64,
    /// `max exp(s - m')` over the tile.
    pub largest: f64,
}

impl RowUpdate {
    /// `l' = l exp(m - m') + sum exp(s - m')`.
    pub fn new_sum(&self) -> f64 {
        self.old_sum * self.rescale + self.tile_sum
    }
}

/// `exp(a - b)`, but 0 for an empty state (`a = -inf`), even if `b` is an empty state too.
fn exp_diff(a: f64, b: f64) -> f64 {
    if a == f64::NEG_INFINITY { 0.0 } else { (a - b).exp() }
}

impl SoftmaxState {
    /// The state before any key.
    pub fn empty(head_dim: usize) -> Self {
        Self { row_max: f64::NEG_INFINITY, row_sum: 0.0, acc: vec![0.0; head_dim] }
    }

    /// The update that a tile with these scaled scores would make. The state does not change.
    pub fn preview(&self, scores: &[f64]) -> RowUpdate {
        let tile_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let new_max = self.row_max.max(tile_max);
        let tile_sum = scores.iter().map(|&s| exp_diff(s, new_max)).sum();
        let (rescale, largest) = (exp_diff(self.row_max, new_max), exp_diff(tile_max, new_max));
        RowUpdate { new_max, rescale, old_sum: self.row_sum, tile_sum, largest }
    }

    /// Adds a tile: `scores[t]` belongs to `values(t)`, a slice of `head_dim` elements.
    pub fn update<'v>(&mut self, scores: &[f64], values: impl Fn(usize) -> &'v [f64]) {
        let update = self.preview(scores);
        self.acc.iter_mut().for_each(|a| *a *= update.rescale);
        for (t, &score) in scores.iter().enumerate() {
            let weight = exp_diff(score, update.new_max);
            for (a, &v) in self.acc.iter_mut().zip(values(t)) {
                *a += weight * v;
            }
        }
        self.row_sum = update.new_sum();
        self.row_max = update.new_max;
    }

    /// The attention output `acc / l`.
    pub fn finish(&self) -> Vec<f64> {
        self.acc.iter().map(|a| a / self.row_sum).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lse(state: &SoftmaxState) -> f64 {
        state.row_max + state.row_sum.ln()
    }

    proptest! {
        #[test]
        fn tiles_one_after_another_are_the_whole(
            scores in prop::collection::vec(-80.0..80.0f64, 1..40),
            tile in 1..40usize,
        ) {
            let values: Vec<[f64; 2]> = (0..scores.len()).map(|t| [t as f64, 1.0]).collect();
            let mut whole = SoftmaxState::empty(2);
            whole.update(&scores, |t| &values[t]);
            let mut tiled = SoftmaxState::empty(2);
            for (scores, values) in scores.chunks(tile).zip(values.chunks(tile)) {
                tiled.update(scores, |t| &values[t]);
            }
            prop_assert!((lse(&tiled) - lse(&whole)).abs() < 1e-12 * (1.0 + lse(&whole).abs()));
            for (a, b) in tiled.finish().iter().zip(whole.finish()) {
                prop_assert!((a - b).abs() < 1e-12 * (1.0 + b.abs()));
            }
            // The second value is always one: the weights sum to one.
            prop_assert!((whole.finish()[1] - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn an_empty_state_weighs_nothing() {
        let mut state = SoftmaxState::empty(1);
        state.update(&[f64::NEG_INFINITY], |_| &[5.0]);
        assert_eq!((state.row_max, state.row_sum), (f64::NEG_INFINITY, 0.0));
        state.update(&[3.0], |_| &[7.0]);
        assert_eq!(state.finish(), [7.0]);
        assert_eq!(lse(&state), 3.0);
    }
}
