//! [`ErrorControl`]: the passes that keep the measured error of each head and segment below a bound.

use crate::config::S2oConfig;
use crate::plan::Plan;
use crate::probes::ProbeStats;

/// The passes over the rows of one head and segment outside the dense tail, for [`S2oConfig::max_error`]. The first has
/// the threshold of the configuration. Where the measured error is above the bound, the rows are computed again with an
/// eighth of the threshold, and then with all keys. All keys come at once if the error is so large that the smaller
/// threshold would hardly do.
#[derive(Debug, Clone)]
pub struct ErrorControl {
    max_error: Option<f64>,
    passes: [S2oConfig; Self::PASSES],
}

impl ErrorControl {
    /// Number of passes at most.
    pub const PASSES: usize = 3;
    /// A measured error of more than so many times the bound needs all keys. A quarter of the threshold lowers the
    /// error of the layers of needle-11m 1.9 to 5 times (docs/algorithm.md).
    pub const REACH: f32 = 2.5;

    /// The passes of a configuration, with the threshold and the stop rule of the plan's prompt.
    pub fn new(config: &S2oConfig, plan: &Plan) -> Self {
        let base =
            || config.to_builder().stop_rule(config.stop_rule().resolve(plan.probe_stride.is_some(), plan.prompt_len));
        let with_tau = |tau| base().tau(tau).build().expect("tau becomes less, and all rules fit the other options");
        let tau = config.tau().resolve(plan.prompt_len);
        let passes = [tau, tau / 8.0, 0.0].map(with_tau);
        Self { max_error: config.max_error().map(f64::from), passes }
    }

    /// The settings of a pass, from 0 on.
    pub fn config(&self, pass: usize) -> &S2oConfig {
        &self.passes[pass]
    }

    /// The pass that follows `pass`, if its error is too large. NaN is in the input, and no pass removes it.
    pub fn next(&self, pass: usize, measured: &ProbeStats) -> Option<usize> {
        let bound = self.max_error.filter(|bound| measured.relative_error() > *bound)?;
        let last = Self::PASSES - 1;
        let is_near = measured.relative_error() <= bound * f64::from(Self::REACH);
        (pass < last).then_some(if is_near { pass + 1 } else { last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{StopRule, Tau};

    #[test]
    fn large_errors_need_all_keys() {
        let plan =
            |prompt_len, probe_stride| Plan { prompt_len, segment_len: 1024, segments: Vec::new(), probe_stride };
        let (short, long) = (plan(1024, None), plan(16 * 1024, Some(64)));
        let longer = plan(128 * 1024, Some(256));
        let rules =
            [&longer, &long, &short].map(|plan| ErrorControl::new(&S2oConfig::default(), plan).config(1).stop_rule());
        assert_eq!(rules, [StopRule::MaxWeight, StopRule::MeanWeight, StopRule::AllRows]);
        let bound = S2oConfig::builder().tau(0.08).max_error(0.125).build().unwrap();
        for (config, plan, taus) in [
            (&bound, &long, [0.08, 0.01, 0.0]),
            (&S2oConfig::default(), &long, [0.015, 0.001_875, 0.0]),
            (&S2oConfig::default(), &short, [0.019, 0.002_375, 0.0]),
        ] {
            let control = ErrorControl::new(config, plan);
            let got: Vec<Tau> = (0..ErrorControl::PASSES).map(|pass| control.config(pass).tau()).collect();
            assert_eq!(got, taus.map(Tau::Fixed));
        }
        let control = ErrorControl::new(&bound, &long);
        let measured =
            |error: f64| ProbeStats::from_sums(0, [1; 2], 0.0, [1.0, 1.0, error * error, 0.5, 0.0, 0.0, 0.0]);
        // The bound itself is allowed, and 2.5 times the bound is near.
        assert_eq!([0.125, 0.126].map(|error| control.next(0, &measured(error))), [None, Some(1)]);
        assert_eq!([0.3125, 0.313].map(|error| control.next(0, &measured(error))), [Some(1), Some(2)]);
        assert_eq!(control.next(1, &measured(0.126)), Some(2));
        assert_eq!(control.next(2, &measured(0.126)), None);
        assert_eq!(control.next(0, &measured(f64::NAN)), None);
        assert_eq!(control.next(0, &ProbeStats::default()), None);
        let off = ErrorControl::new(&S2oConfig::default(), &long);
        assert_eq!(off.next(0, &measured(0.9)), None);
    }
}
