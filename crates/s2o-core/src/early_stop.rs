//! The stop decision after each key tile: is its gain, or the weight of single keys, below `tau` times the mass so far?
//!
//! It is one decision for a whole query tile, based on the `(m, l)` of its rows before and after the key tile. The
//! reference and the CPU path call this code. The CUDA kernels implement it in f32: `Gain` and `MeanLargest`
//! (kernels/cuda/early_stop.cuh) and, for each engine, `StopVote` (stop_vote.cuh).

use crate::config::{GainFrame, S2oConfig, StopRule};
use crate::online_softmax::RowUpdate;

/// Gain of a key tile for one row, and the mass it is compared with, both in the same frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// Softmax mass that the tile adds.
    pub gain: f64,
    /// Softmax mass before the tile.
    pub mass: f64,
    /// Largest weight of a key of the tile, relative to the mass before the tile. In every frame this is the ratio in
    /// the frame of the new maximum.
    pub largest: f64,
}

impl Gain {
    /// The gain of one row in `frame`.
    pub fn of(update: &RowUpdate, frame: GainFrame) -> Self {
        let mass = update.old_sum * update.rescale;
        // A key with a score that is not a number has no largest weight, but makes the sum NaN.
        let largest = if update.tile_sum.is_nan() { f64::NAN } else { update.largest / mass };
        match frame {
            GainFrame::NewMax => Self { gain: update.tile_sum, mass, largest },
            GainFrame::Literal => Self { gain: update.new_sum() - update.old_sum, mass: update.old_sum, largest },
        }
    }
}

/// The stop decisions of one query tile: collects the gains of a key tile for its rows, then decides whether to stop.
#[derive(Debug, Clone, Copy)]
pub struct StopVote {
    rule: StopRule,
    tau: f64,
    /// Number of key tiles of the prefix.
    tiles: usize,
    /// Number of key tiles so far.
    judged: usize,
    /// For [`StopRule::MeanWeight`].
    mean_weight: f64,
    of_tile: Sums,
}

/// Over the rows of one key tile.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    rows: usize,
    rows_below: usize,
    largest: f64,
    ratio: f64,
    gain: f64,
    mass: f64,
}

impl StopVote {
    /// The vote before the first of `tiles` key tiles. If the configuration leaves the rule or the threshold open, they
    /// are those of a short prompt without probes.
    pub fn new(config: &S2oConfig, tiles: usize) -> Self {
        Self {
            rule: config.stop_rule().resolve(false, 0),
            tau: f64::from(config.tau().resolve(0)),
            tiles,
            judged: 0,
            mean_weight: 0.0,
            of_tile: Sums::default(),
        }
    }

    /// Adds one row.
    pub fn add(&mut self, Gain { gain, mass, largest }: Gain) {
        let sums = &mut self.of_tile;
        sums.rows += 1;
        // NaN is never below and always the largest: a row with NaN sees every key, as in dense attention.
        sums.rows_below += usize::from(gain < self.tau * mass);
        if largest > sums.largest || largest.is_nan() {
            sums.largest = largest;
        }
        sums.ratio += gain / mass;
        sums.gain += gain;
        sums.mass += mass;
    }

    /// Whether the query tile stops after the key tile whose rows were added. With `tau` 0 it never stops, for every rule
    /// and frame.
    pub fn stops(&mut self) -> bool {
        let sums = std::mem::take(&mut self.of_tile);
        self.judged += 1;
        let judged = self.judged as f64;
        // This form keeps NaN.
        let weight = if sums.largest > 1.0 { 1.0 } else { sums.largest };
        self.mean_weight += (weight - self.mean_weight) * (StopRule::RECENCY / judged).min(1.0);
        self.tau > 0.0
            && sums.rows > 0
            && match self.rule {
                StopRule::Auto | StopRule::AllRows => sums.rows_below == sums.rows,
                StopRule::MaxWeight => sums.largest < self.tau * StopRule::WEIGHT_SHARE,
                StopRule::MeanWeight => {
                    let left = (self.tiles as f64 - judged + 1.0) / self.tiles as f64;
                    self.mean_weight * left < self.tau
                }
                StopRule::MeanRatio => sums.ratio / (sums.rows as f64) < self.tau,
                StopRule::SumRatio => sums.gain < self.tau * sums.mass,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online_softmax::SoftmaxState;

    fn vote(rule: StopRule, tau: f32, gains: &[(f64, f64)]) -> bool {
        let config = S2oConfig::builder().stop_rule(rule).tau(tau).build().unwrap();
        let mut vote = StopVote::new(&config, 1);
        gains.iter().for_each(|&(gain, mass)| vote.add(Gain { gain, mass, largest: gain / mass / 2.0 }));
        vote.stops()
    }

    #[test]
    fn rules_differ_where_one_row_gains() {
        let gains = [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.3, 10.0)];
        assert!(!vote(StopRule::AllRows, 0.02, &gains));
        assert!(vote(StopRule::MeanRatio, 0.02, &gains));
        assert!(!vote(StopRule::SumRatio, 0.02, &gains));
        assert!(vote(StopRule::SumRatio, 0.03, &gains));
        assert!(!vote(StopRule::MaxWeight, 0.044, &gains));
        assert!(vote(StopRule::MaxWeight, 0.046, &gains), "a key has .015 of the mass");
        assert!(!vote(StopRule::MeanWeight, 0.014, &gains));
        assert!(vote(StopRule::MeanWeight, 0.016, &gains), "the same key");
        assert!(!vote(StopRule::Auto, 0.02, &gains));
        assert!(vote(StopRule::Auto, 0.031, &gains), "without probes the rule is that of all rows");
    }

    #[test]
    fn the_largest_weight_is_relative_to_the_mass_before_the_tile() {
        let mut state = SoftmaxState::empty(1);
        state.update(&[1.0, 0.0], |_| &[0.0]);
        for (scores, largest) in [([0.5, -1.0], 0.5f64.exp()), ([3.0, 2.9], 3.0f64.exp())] {
            for frame in [GainFrame::NewMax, GainFrame::Literal] {
                let gain = Gain::of(&state.preview(&scores), frame);
                assert!((gain.largest - largest / (1.0f64.exp() + 1.0)).abs() < 1e-12, "{scores:?}");
            }
        }
        assert!(Gain::of(&state.preview(&[f64::NAN, 0.0]), GainFrame::NewMax).largest.is_nan());
        assert_eq!(Gain::of(&state.preview(&[f64::NEG_INFINITY; 2]), GainFrame::NewMax).largest, 0.0);
    }

    #[test]
    fn a_gain_equal_to_the_threshold_goes_on() {
        // Powers of two, so that products and sums are exact. The last row alone is below.
        for rule in [StopRule::AllRows, StopRule::MeanRatio, StopRule::SumRatio] {
            assert!(!vote(rule, 0.25, &[(0.5, 2.0), (1.0, 4.0)]), "{rule:?} at equality");
            assert!(vote(rule, 0.25, &[(0.4375, 2.0), (0.9375, 4.0)]), "{rule:?} below");
        }
        assert!(!vote(StopRule::AllRows, 0.25, &[(0.5, 2.0), (0.5, 4.0)]), "one row at equality");
        for (rule, limit) in [(StopRule::MaxWeight, 0.75 * StopRule::WEIGHT_SHARE), (StopRule::MeanWeight, 0.75)] {
            let stops_at = |largest| {
                let config = S2oConfig::builder().stop_rule(rule).tau(0.75).build().unwrap();
                let mut vote = StopVote::new(&config, 1);
                vote.add(Gain { gain: 9.0, mass: 1.0, largest });
                vote.stops()
            };
            assert!(!stops_at(limit) && stops_at(limit * 0.999), "{rule:?}");
        }
    }

    #[test]
    fn a_heavy_key_is_remembered_and_few_tiles_left_count_less() {
        let config = S2oConfig::builder().stop_rule(StopRule::MeanWeight).tau(0.1).build().unwrap();
        let stops_after = |weights: &dyn Fn(usize) -> f64, tiles: usize| {
            let mut vote = StopVote::new(&config, tiles);
            (1..=tiles).find(|&tile| {
                vote.add(Gain { gain: 0.0, mass: 1.0, largest: 0.0 });
                vote.add(Gain { gain: 0.0, mass: 1.0, largest: weights(tile) });
                vote.stops()
            })
        };
        assert_eq!(stops_after(&|_| 0.09, 100), Some(1));
        // .11 (100 - 10 + 1) / 100 is .1001.
        assert_eq!(stops_after(&|_| 0.11, 100), Some(11));
        let with_heavy = |heavy| move |tile| if tile == 6 { heavy } else { 0.101 };
        assert_eq!(stops_after(&with_heavy(0.101), 1000), Some(11));
        assert_eq!(stops_after(&with_heavy(1.0), 1000), Some(18));
        assert_eq!(stops_after(&with_heavy(7.0), 1000), stops_after(&with_heavy(1.0), 1000), "a weight counts up to 1");
        // Tile 6 alone: the mean is 5/6, and in tile 7, 8, ... 1 - 5/7, 1 - 5/8, ... times that before.
        let mean = |tile: u32| (7..=tile).map(|tile| 1.0 - 5.0 / f64::from(tile)).product::<f64>() * 5.0 / 6.0;
        let mut vote = StopVote::new(&config, 1_000_000);
        let stops: Vec<bool> = (1..=12)
            .map(|tile| {
                vote.add(Gain { gain: 0.0, mass: 1.0, largest: f64::from(u8::from(tile == 6)) });
                vote.stops()
            })
            .collect();
        assert_eq!(stops, (1..=12).map(|tile| tile < 6 || mean(tile) < 0.1).collect::<Vec<_>>());
        assert!(!stops[6] && stops[7]);
    }

    #[test]
    fn nothing_stops_at_tau_zero_or_on_nan() {
        for rule in
            [StopRule::AllRows, StopRule::MeanRatio, StopRule::SumRatio, StopRule::MaxWeight, StopRule::MeanWeight]
        {
            assert!(!vote(rule, 0.0, &[(-1.0, 1.0)]), "{rule:?} at tau 0");
            assert!(!vote(rule, 0.5, &[(f64::NAN, 1.0), (0.0, 1.0)]), "{rule:?} with NaN");
            assert!(!vote(rule, 0.5, &[]), "{rule:?} without rows");
        }
    }

    #[test]
    fn the_literal_frame_can_gain_less_than_nothing() {
        let update = RowUpdate { new_max: 3.0, rescale: (-3.0f64).exp(), old_sum: 8.0, tile_sum: 1.0, largest: 1.0 };
        assert!(Gain::of(&update, GainFrame::Literal).gain < 0.0);
        let fair = Gain::of(&update, GainFrame::NewMax);
        assert_eq!(fair.gain, 1.0);
        assert!((fair.mass - 8.0 * (-3.0f64).exp()).abs() < 1e-15);
    }
}
