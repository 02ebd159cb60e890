//! The structure that makes the attention of `calibrated` weights look trained: a few hidden channels that no layer
//! changes, and the directions of q and k that read them.
//!
//! Channel [`CONSTANT`] is the same for every token, [`IMPORTANCE`] is drawn for each token id from an exponential
//! distribution, and [`FIRST`] is 0 except for id 0. The rows of `o_proj` and `down_proj` that would write to them are
//! zero, so every layer reads what the embedding wrote. The rest of the residual stream is random content. The rotary
//! pairs of a head have four roles (fast pairs first):
//!
//! - local: q and k carry the same constant, so a key at distance d scores `A / n * sum_i cos(freq_i * d)`, which falls
//!   about linearly in `log d` to zero at [`REACH`]: attention falls as a power of the distance;
//! - middle: random content only, which is noise on the scores;
//! - ballast: one pair that is large in q and absent from k. It gives all heads of a layer the same |q|, because the q
//!   norm of Qwen3 would otherwise remove their differences;
//! - low: pairs that turn by less than a radian over the whole context. Even pairs carry the importance (every query
//!   sees the same strong keys: vertical stripes, whose mass falls as a power of their rank), odd pairs the sink.
//!
//! [`Head`] holds the strengths of the four in a head, in nats. docs/synthetic.md has the measurements.

use std::ops::Range;

use crate::config::DecoderConfig;
use crate::random::SplitMix64;

/// Channels of the residual stream that hold [`CONSTANT`], [`IMPORTANCE`] and [`FIRST`].
pub(super) const RESERVED: usize = 3;
const CONSTANT: usize = 0;
const IMPORTANCE: usize = 1;
const FIRST: usize = 2;

/// Size of the constant and of the first token's channel, in units of the whole stream's norm.
const CONSTANT_SHARE: f64 = 0.125;
/// Size of an importance of 1, in the same unit. The largest among 150 thousand ids is about 12.
const IMPORTANCE_SHARE: f64 = 0.01;

/// Increase of the stream's mean square, initially 1, over all layers together. It is small, so that the reserved
/// channels have about the same size everywhere.
const GROWTH: f64 = 0.5;
/// Mean square of `silu(gate) * up` for independent standard normal `gate` and `up`.
const GATED_MEAN_SQUARE: f64 = 0.355;

/// Distance at which the local bump ends.
const REACH: f64 = 2048.0;
/// Norms in k of the local constant, of the importance at 1, and of the sink. The last two are small in k and large in
/// q; otherwise a k norm would shrink an important key's other parts.
const K_LOCAL: f64 = 8.0;
const K_IMPORTANCE: f64 = 0.25;
const K_SINK: f64 = 4.0;
/// Standard deviation of the content in k, and in those of its pairs that q reads at a large scale.
const K_CONTENT: f64 = 0.6;
const K_QUIET: f64 = 0.1;

/// A kind of head: its share of all heads, and the ranges from which a [`Head`] of it is drawn.
struct Kind {
    share: f64,
    local: [f64; 2],
    stripes: [f64; 2],
    sink: [f64; 2],
    noise: [f64; 2],
}

/// Many heads of a trained model attend little beyond the window, some attend everywhere, and the rest do both.
const KINDS: [Kind; 3] = [
    Kind { share: 0.44, local: [12.0, 18.0], stripes: [0.3, 0.8], sink: [6.0, 16.0], noise: [0.5, 1.1] },
    Kind { share: 0.35, local: [6.0, 12.0], stripes: [0.4, 0.9], sink: [6.0, 16.0], noise: [0.6, 1.3] },
    Kind { share: 0.21, local: [0.0, 5.0], stripes: [0.1, 0.6], sink: [4.0, 9.0], noise: [1.0, 2.0] },
];

/// The strengths of a query head's attention, in nats of the attention score.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Head {
    /// Height of the local bump at distance 0.
    local: f64,
    /// Score of a key for each unit of its importance.
    stripes: f64,
    /// Score of the first token.
    sink: f64,
    /// Standard deviation of the content's part.
    noise: f64,
}

impl Head {
    /// `rank` (0 to 1) chooses the kind, `random` the rest.
    fn draw(rank: f64, random: &mut SplitMix64, focus: f64) -> Self {
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

/// Columns of a matrix for the reserved channels, and the standard deviation of the rest of each row.
#[derive(Debug)]
pub(super) struct Rows {
    /// Row after row, [`RESERVED`] each.
    pub(super) columns: Vec<f32>,
    pub(super) deviations: Vec<f32>,
}

/// The plan of a whole model.
#[derive(Debug)]
pub(super) struct Anatomy {
    seed: u64,
    focus: f64,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// Width of the residual stream.
    hidden: f64,
    /// Factor on scores: the softmax scale, and YaRN's factor on q and on k.
    scale: f64,
    qk_norm: bool,
    local: Vec<usize>,
    ballast: usize,
    low: Range<usize>,
}

impl Anatomy {
    /// The smallest head that has pairs for all roles.
    pub(super) const MIN_HEAD_DIM: usize = 16;

    pub(super) fn new(config: &DecoderConfig, focus: f64, seed: u64) -> Self {
        let frequencies = config.rope.inverse_frequencies(config.head_dim);
        let pairs = frequencies.len();
        let faster_than = |limit: f64| frequencies.iter().filter(|freq| f64::from(**freq) >= limit).count();
        let low = faster_than(1.0 / config.max_positions as f64).clamp(pairs / 2, pairs - (pairs / 16).max(2));
        let ballast = low - 1;
        Self {
            seed,
            focus,
            num_layers: config.num_layers,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            hidden: config.hidden_size as f64,
            scale: config.rope.attention_factor().powi(2) / (config.head_dim as f64).sqrt(),
            qk_norm: config.qk_norm,
            local: (0..faster_than(1.0 / REACH).clamp(2, ballast)).collect(),
            ballast,
            low: low..pairs,
        }
    }

    /// The reserved channels of the embedding, row after row. The rest of it has standard deviation 1.
    pub(super) fn embedding(&self, vocab_size: usize) -> Vec<f32> {
        let mut random = self.random(u64::MAX);
        let norm = self.hidden.sqrt();
        let rows = (0..vocab_size).flat_map(|id| {
            let importance = -random.unit().ln();
            let mut row = [0.0; RESERVED];
            row[CONSTANT] = (CONSTANT_SHARE * norm) as f32;
            // The first token has a channel of its own.
            row[IMPORTANCE] = if id == 0 { 0.0 } else { (IMPORTANCE_SHARE * norm * importance) as f32 };
            row[FIRST] = if id == 0 { (CONSTANT_SHARE * norm) as f32 } else { 0.0 };
            row
        });
        rows.collect()
    }

    /// The query projection of a layer.
    pub(super) fn q_proj(&self, layer: usize) -> Rows {
        let heads = self.heads(layer);
        let largest = self.largest_q_square(&heads);
        let unit = self.per_constant(layer);
        let (importance, sink) = self.low_pairs();
        let mut rows = self.rows(self.num_heads);
        for (number, head) in heads.iter().enumerate() {
            let phases = self.phases(layer, number * self.num_kv_heads / self.num_heads);
            let [of_local, of_importance, of_sink, content] = self.q_parts(head);
            let deviation = content / self.hidden.sqrt();
            rows.deviations[number * self.head_dim..][..self.head_dim].fill(deviation as f32);
            let mut add =
                |pairs: &[usize], norm: f64| self.add(&mut rows, number, &phases, pairs, CONSTANT, norm * unit);
            add(&self.local, of_local);
            add(&importance, of_importance);
            add(&sink, of_sink);
            if self.qk_norm {
                add(&[self.ballast], (largest - self.q_square(head)).max(0.0).sqrt());
            }
        }
        rows
    }

    /// The key projection of a layer.
    pub(super) fn k_proj(&self, layer: usize) -> Rows {
        let unit = self.per_constant(layer);
        let (importance, sink) = self.low_pairs();
        let mut rows = self.rows(self.num_kv_heads);
        for number in 0..self.num_kv_heads {
            let phases = self.phases(layer, number);
            let first = number * self.head_dim;
            rows.deviations[first..][..self.head_dim].fill((K_CONTENT / self.hidden.sqrt()) as f32);
            for pair in self.low.clone().chain([self.ballast]) {
                for dim in [first + pair, first + pair + self.head_dim / 2] {
                    rows.deviations[dim] = (K_QUIET / self.hidden.sqrt()) as f32;
                }
            }
            let mut add = |pairs: &[usize], channel, size| self.add(&mut rows, number, &phases, pairs, channel, size);
            add(&self.local, CONSTANT, K_LOCAL * unit);
            add(&importance, IMPORTANCE, K_IMPORTANCE * unit * CONSTANT_SHARE / IMPORTANCE_SHARE);
            add(&sink, FIRST, K_SINK * unit);
        }
        rows
    }

    /// Makes a head read `channel` into `pairs`, at their phases and with the norm `size` per unit of the channel.
    fn add(&self, rows: &mut Rows, head: usize, phases: &[f64], pairs: &[usize], channel: usize, size: f64) {
        let size = size / (pairs.len() as f64).sqrt();
        for pair in pairs {
            let (sin, cos) = phases[*pair].sin_cos();
            let row = head * self.head_dim + pair;
            // The rotation turns entry i of a head with entry i + head_dim / 2.
            rows.columns[row * RESERVED + channel] = (cos * size) as f32;
            rows.columns[(row + self.head_dim / 2) * RESERVED + channel] = (sin * size) as f32;
        }
    }

    /// The value of a q norm's weight: the divisor of the norm.
    pub(super) fn q_norm(&self, layer: usize) -> f32 {
        (self.largest_q_square(&self.heads(layer)) / self.head_dim as f64).sqrt() as f32
    }

    /// The value of a k norm's weight.
    pub(super) fn k_norm(&self) -> f32 {
        let quiet = 2 * (self.low.len() + 1);
        let content = (self.head_dim - quiet) as f64 * K_CONTENT.powi(2) + quiet as f64 * K_QUIET.powi(2);
        ((K_LOCAL.powi(2) + content) / self.head_dim as f64).sqrt() as f32
    }

    /// Standard deviation of `o_proj`, relative to `1 / sqrt(fan_in)`: at most half of the growth, for attention to one
    /// key.
    pub(super) fn o_proj(&self) -> f64 {
        (GROWTH / 2.0 / self.num_layers as f64).sqrt()
    }

    /// The same for `down_proj`: the other half.
    pub(super) fn down_proj(&self) -> f64 {
        (GROWTH / 2.0 / (GATED_MEAN_SQUARE * self.num_layers as f64)).sqrt()
    }

    fn heads(&self, layer: usize) -> Vec<Head> {
        // Multiples of the golden ratio cover the kinds evenly from the first heads on: with independent draws the
        // density of a model with few heads would depend on chance.
        const GOLDEN: f64 = 0.618_033_988_749_894_9;
        let start = self.random(u64::MAX - 1).unit();
        let mut random = self.random(2 * layer as u64);
        let numbers = layer * self.num_heads..(layer + 1) * self.num_heads;
        numbers.map(|number| Head::draw((start + number as f64 * GOLDEN).fract(), &mut random, self.focus)).collect()
    }

    /// Angles of the constants of a KV head, which its query heads share.
    fn phases(&self, layer: usize, kv_head: usize) -> Vec<f64> {
        let mut random = self.random(2 * layer as u64 + 1);
        let pairs = self.head_dim / 2;
        let all = std::iter::repeat_with(|| random.unit() * std::f64::consts::TAU);
        all.skip(kv_head * pairs).take(pairs).collect()
    }

    fn random(&self, stream: u64) -> SplitMix64 {
        // One step scatters the sum, so neighbouring streams have nothing in common.
        SplitMix64::new(SplitMix64::new(self.seed ^ 0xa11a_70e1).next_u64().wrapping_add(stream))
    }

    fn rows(&self, heads: usize) -> Rows {
        let rows = heads * self.head_dim;
        Rows { columns: vec![0.0; rows * RESERVED], deviations: vec![0.0; rows] }
    }

    /// The pairs of the importance and of the sink.
    fn low_pairs(&self) -> (Vec<usize>, Vec<usize>) {
        self.low.clone().partition(|pair| pair.is_multiple_of(2))
    }

    /// The weight with which the normalised constant channel yields 1.
    fn per_constant(&self, layer: usize) -> f64 {
        let mean_square = 1.0 + GROWTH * layer as f64 / self.num_layers as f64;
        (mean_square + CONSTANT_SHARE.powi(2)).sqrt() / (CONSTANT_SHARE * self.hidden.sqrt())
    }

    /// Norms in q of the local constant, the importance and the sink of a head, and the deviation of its content.
    fn q_parts(&self, head: &Head) -> [f64; 4] {
        [
            head.local / (self.scale * K_LOCAL),
            head.stripes / (self.scale * K_IMPORTANCE),
            head.sink / (self.scale * K_SINK),
            head.noise / (self.scale * K_CONTENT * (self.head_dim as f64).sqrt()),
        ]
    }

    fn largest_q_square(&self, heads: &[Head]) -> f64 {
        heads.iter().map(|head| self.q_square(head)).fold(0.0, f64::max)
    }

    fn q_square(&self, head: &Head) -> f64 {
        let [local, importance, sink, content] = self.q_parts(head);
        local.powi(2) + importance.powi(2) + sink.powi(2) + content.powi(2) * self.head_dim as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::synthetic::Shape;

    /// The score of a key `distance` tokens back, from the constant in q and `channel` in k, both normalised.
    fn score(
        anatomy: &Anatomy,
        config: &DecoderConfig,
        layer: usize,
        head: usize,
        channel: usize,
        distance: f64,
    ) -> f64 {
        let (q, k) = (anatomy.q_proj(layer).columns, anatomy.k_proj(layer).columns);
        let kv_head = head * config.num_kv_heads / config.num_heads;
        let half = config.head_dim / 2;
        let read = |columns: &[f32], head: usize, pair: usize, channel: usize| {
            let at = |dim: usize| f64::from(columns[(head * config.head_dim + dim) * RESERVED + channel]);
            (at(pair) / anatomy.per_constant(layer), at(pair + half) / anatomy.per_constant(layer))
        };
        let frequencies = config.rope.inverse_frequencies(config.head_dim);
        let pairs = frequencies.iter().enumerate().map(|(pair, freq)| {
            let ((a, b), (c, d)) = (read(&q, head, pair, CONSTANT), read(&k, kv_head, pair, channel));
            let (sin, cos) = (f64::from(*freq) * distance).sin_cos();
            (a * c + b * d) * cos + (a * d - b * c) * sin
        });
        anatomy.scale * pairs.sum::<f64>()
    }

    #[test]
    fn scores_are_what_the_heads_were_drawn_for() {
        for shape in [Shape::Llama31_8b, Shape::Qwen3_8b] {
            let config = shape.config().unwrap();
            let anatomy = Anatomy::new(&config, 1.0, 9);
            let heads = anatomy.heads(3);
            for (number, head) in heads.iter().enumerate().step_by(7) {
                let score = |channel, distance| score(&anatomy, &config, 3, number, channel, distance);
                let near = |a: f64, b: f64| (a - b).abs() < 1e-3 * b.abs().max(1.0);
                assert!(near(score(CONSTANT, 0.0), head.local), "{shape:?} {head:?}");
                assert!(near(score(FIRST, 0.0), head.sink), "{shape:?} {head:?}");
                // An importance of 1 is smaller than the constant.
                let importance = IMPORTANCE_SHARE / CONSTANT_SHARE;
                assert!(near(score(IMPORTANCE, 0.0) * importance, head.stripes), "{shape:?} {head:?}");

                // Near keys score higher, and far ones keep their importance to the end of the context.
                assert!(score(CONSTANT, 30.0) < 0.8 * head.local + 0.01, "{shape:?} {head:?}");
                assert!(score(CONSTANT, 4096.0).abs() < 0.4 * head.local + 0.01, "{shape:?} {head:?}");
                assert!(score(IMPORTANCE, 131_071.0) * importance > 0.8 * head.stripes, "{shape:?} {head:?}");
                assert!(score(FIRST, 131_071.0) > 0.8 * head.sink, "{shape:?} {head:?}");
            }
        }
    }

    #[test]
    fn every_head_of_a_normed_layer_is_as_long() {
        let config = Shape::Qwen3_8b.config().unwrap();
        let anatomy = Anatomy::new(&config, 1.0, 9);
        let rows = anatomy.q_proj(5);
        let (unit, norm) = (anatomy.per_constant(5), f64::from(anatomy.q_norm(5)));
        for head in 0..config.num_heads {
            let dims = head * config.head_dim..(head + 1) * config.head_dim;
            let square: f64 = dims
                .map(|dim| {
                    let constant = f64::from(rows.columns[dim * RESERVED + CONSTANT]) / unit;
                    constant.powi(2) + f64::from(rows.deviations[dim]).powi(2) * anatomy.hidden
                })
                .sum();
            let root = (square / config.head_dim as f64).sqrt();
            assert!((root / norm - 1.0).abs() < 1e-3, "head {head}: {root} of {norm}");
        }
    }

    #[test]
    fn kinds_come_in_their_parts() {
        assert!((KINDS.iter().map(|kind| kind.share).sum::<f64>() - 1.0).abs() < 1e-12);
        let config = Shape::Llama31_8b.config().unwrap();
        let anatomy = Anatomy::new(&config, 1.0, 4);
        for layer in 0..config.num_layers {
            let local = anatomy.heads(layer).iter().filter(|head| head.local >= KINDS[0].local[0]).count();
            assert!((12..=16).contains(&local), "layer {layer}: {local} of 32 heads are local");
        }
    }
}
