//! [`Head`]: the attention of a query head of `calibrated` weights, drawn from the kinds that trained models have.

use crate::random::SplitMix64;

/// A kind of head: its share of all heads, and the ranges from which a [`Head`] of it is drawn.
pub(super) struct Kind {
    pub(super) share: f64,
    pub(super) local: [f64; 2],
    stripes: [f64; 2],
    sink: [f64; 2],
    noise: [f64; 2],
}

/// Many heads of a trained model attend little beyond the window, some attend everywhere, and the rest do both.
pub(super) const KINDS: [Kind; 3] = [
    Kind { share: 0.44, local: [12.0, 18.0], stripes: [0.3, 0.8], sink: [6.0, 16.0], noise: [0.5, 1.1] },
    Kind { share: 0.35, local: [6.0, 12.0], stripes: [0.4, 0.9], sink: [6.0, 16.0], noise: [0.6, 1.3] },
    Kind { share: 0.21, local: [0.0, 5.0], stripes: [0.1, 0.6], sink: [4.0, 9.0], noise: [1.0, 2.0] },
];

/// The strengths of a query head's attention, in nats of the attention score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Head {
    /// Height of the local bump at distance 0.
    pub(super) local: f64,
    /// Score of a key for each unit of its importance.
    pub(super) stripes: f64,
    /// Score of the first token.
    pub(super) sink: f64,
    /// Standard deviation of the content's part.
    pub(super) noise: f64,
}

impl Head {
    /// `rank` (0 to 1) chooses the kind, `random` the rest.
    pub(super) fn draw(rank: f64, random: &mut SplitMix64, focus: f64) -> Self {
        let mut left = rank;
        let kind = KINDS.iter().find(|kind| {
            left -= kind.share;
            left < 0.0
        });
        let kind = kind.unwrap_or(&KINDS[KINDS.len() - 1]);
        let mut between = |[low, high]: [f64; 2]| low + (high - low) * random.unit();
        Self {
            local: focus * between(kind.local),
            stripes: focus * between(kind.stripes),
            sink: focus * between(kind.sink),
            noise: between(kind.noise),
        }
    }
}
