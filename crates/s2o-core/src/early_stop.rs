//! The stop decision: is the gain of a key tile below `tau` times the mass so far?
//!
//! It is one decision for a whole query tile, based on the `(m, l)` of its rows before and after the key tile. The
//! reference and the CPU path call this code. The CUDA kernels implement it in f32: `Gain`
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

/// Collects the gains of one key tile for the rows of one query tile, then decides whether to stop.
#[derive(Debug, Clone, Copy)]
pub struct StopVote {
    rule: StopRule,
    tau: f64,
    rows: usize,
    all_below: bool,
    all_light: bool,
    ratio_sum: f64,
    gain_sum: f64,
    mass_sum: f64,
}

impl StopVote {
    /// A vote without rows. If the configuration leaves the rule or the threshold open, they are those of a short prompt
    /// without probes.
    pub fn new(config: &S2oConfig) -> Self {
        Self {
            rule: config.stop_rule().resolve(false),
            tau: f64::from(config.tau().resolve(0)),
            rows: 0,
            all_below: true,
            all_light: true,
            ratio_sum: 0.0,
            gain_sum: 0.0,
            mass_sum: 0.0,
        }
    }

    /// Adds one row.
    pub fn add(&mut self, Gain { gain, mass, largest }: Gain) {
        self.rows += 1;
        // This form never counts NaN as below: a row with NaN sees every key, as in dense attention.
        self.all_below &= gain < self.tau * mass;
        self.all_light &= largest < self.tau * StopRule::WEIGHT_SHARE;
        self.ratio_sum += gain / mass;
        self.gain_sum += gain;
        self.mass_sum += mass;
    }

    /// Whether the query tile stops. With `tau` 0 it never stops, for every rule and frame.
    pub fn stops(&self) -> bool {
        self.tau > 0.0
            && self.rows > 0
            && match self.rule {
                StopRule::Auto | StopRule::AllRows => self.all_below,
                StopRule::MaxWeight => self.all_light,
                StopRule::MeanRatio => self.ratio_sum / (self.rows as f64) < self.tau,
                StopRule::SumRatio => self.gain_sum < self.tau * self.mass_sum,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online_softmax::SoftmaxState;

    fn vote(rule: StopRule, tau: f32, gains: &[(f64, f64)]) -> bool {
        let config = S2oConfig::builder().stop_rule(rule).tau(tau).build().unwrap();
        let mut vote = StopVote::new(&config);
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
        let light = |largest| {
            let config = S2oConfig::builder().stop_rule(StopRule::MaxWeight).tau(0.75).build().unwrap();
            let mut vote = StopVote::new(&config);
            vote.add(Gain { gain: 9.0, mass: 1.0, largest });
            vote.stops()
        };
        let limit = 0.75 * StopRule::WEIGHT_SHARE;
        assert!(!light(limit) && light(limit * 0.999), "a third of tau is not below");
    }

    #[test]
    fn nothing_stops_at_tau_zero_or_on_nan() {
        for rule in [StopRule::AllRows, StopRule::MeanRatio, StopRule::SumRatio, StopRule::MaxWeight] {
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
