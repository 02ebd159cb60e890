//! Random calls: shapes, options and tensors with peaked attention, so that the stop rule has something to decide.

use proptest::prelude::*;
use s2o_core::cpu::{self, Element, Inputs, Strided};
use s2o_core::{
    AttnShape, AttnStats, GainFrame, KeyScore, Mask, Ranking, S2oConfig, S2oError, ScoreScale, SegmentLen, StopRule,
    TriggeringTile,
};
use s2o_testkit::noise;

/// One attention call.
#[derive(Clone)]
pub struct Case {
    pub shape: AttnShape,
    pub config: S2oConfig,
    pub prompt_len: usize,
    pub softcap: Option<f32>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// Prints no tensors, which would fill the screen.
impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {:?} {:?}", self.shape, self.config, self.prompt_len, self.softcap)
    }
}

impl Case {
    pub fn qkv(&self) -> [&[f32]; 3] {
        [&self.q, &self.k, &self.v]
    }

    pub fn tau(&self) -> f32 {
        self.config.tau().resolve(self.prompt_len)
    }

    pub fn inputs(&self) -> Inputs<'_, f32> {
        scaled_inputs(&self.shape, self.scale(), [&self.q, &self.k, &self.v])
    }

    /// [`attention`] of the case.
    pub fn attention(&self, ranking: Option<&Ranking>) -> (Vec<f32>, AttnStats) {
        attention(&self.inputs(), &self.config, self.prompt_len, ranking).unwrap()
    }

    pub fn scale(&self) -> ScoreScale {
        ScoreScale { softmax_scale: self.shape.default_softmax_scale(), softcap: self.softcap }
    }

    pub fn with(&self, change: impl FnOnce(s2o_core::S2oConfigBuilder) -> s2o_core::S2oConfigBuilder) -> Self {
        Self { config: change(self.config.to_builder()).build().unwrap(), ..self.clone() }
    }
}

/// Contiguous operands with the usual scale.
pub fn inputs<'a, T: Element>(shape: &AttnShape, q: &'a [T], k: &'a [T], v: &'a [T]) -> Inputs<'a, T> {
    scaled_inputs(shape, shape.default_softmax_scale(), [q, k, v])
}

fn scaled_inputs<'a, T: Element>(
    shape: &AttnShape,
    scale: impl Into<ScoreScale>,
    [q, k, v]: [&'a [T]; 3],
) -> Inputs<'a, T> {
    let q_dims = [shape.batch(), shape.q_len(), shape.num_heads(), shape.head_dim()];
    let k_dims = [shape.batch(), shape.k_len(), shape.num_kv_heads(), shape.head_dim()];
    Inputs::new(
        Strided::contiguous("q", q, q_dims).unwrap(),
        Strided::contiguous("k", k, k_dims).unwrap(),
        Strided::contiguous("v", v, k_dims).unwrap(),
        scale,
    )
    .unwrap()
}

/// An output that no path has written.
fn unwritten(inputs: &Inputs<'_, f32>) -> Vec<f32> {
    let shape = inputs.shape();
    vec![f32::NAN; shape.batch() * shape.q_len() * shape.num_heads() * shape.head_dim()]
}

/// The output and the statistics of the fast path.
pub fn attention(
    inputs: &Inputs<'_, f32>,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: Option<&Ranking>,
) -> Result<(Vec<f32>, AttnStats), S2oError> {
    let mut out = unwritten(inputs);
    let stats = match ranking {
        Some(ranking) => cpu::attention_with_ranking(inputs, config, prompt_len, ranking, &mut out)?,
        None => cpu::attention(inputs, config, prompt_len, &mut out)?,
    };
    Ok((out, stats))
}

/// The output of the dense path.
pub fn dense(inputs: &Inputs<'_, f32>, mask: Mask) -> Vec<f32> {
    let mut out = unwritten(inputs);
    cpu::dense(inputs, mask, &mut out);
    out
}

/// Tensors of a shape. `sharpness` scales the queries, and thus makes attention more peaked.
pub fn tensors(shape: &AttnShape, seed: u64, sharpness: f32) -> [Vec<f32>; 3] {
    let q_len = shape.batch() * shape.q_len() * shape.num_heads() * shape.head_dim();
    let k_len = shape.batch() * shape.k_len() * shape.num_kv_heads() * shape.head_dim();
    let q = noise(q_len, seed).into_iter().map(|x| x * sharpness).collect();
    let mut k = noise(k_len, seed + 1);
    // A common direction, and some keys far along it, which ranked attention finds early.
    for (t, key) in k.chunks_exact_mut(shape.head_dim()).enumerate() {
        let lift = if t % 17 == 0 { 2.0 } else { 1.0 };
        key.iter_mut().for_each(|x| *x *= 2.0 * lift);
    }
    [q, k, noise(k_len, seed + 2)]
}

prop_compose! {
    fn shapes()(
        batch in 1..=2usize,
        kv_heads in 1..=2usize,
        group in prop_oneof![Just(1usize), Just(2), Just(4)],
        head_dim in prop_oneof![Just(8usize), Just(24), Just(40), Just(64), Just(128), Just(192), Just(256)],
        k_len in 1..700usize,
        before in 0.0..1.0f64,
    ) -> AttnShape {
        let q_len = k_len - ((k_len - 1) as f64 * before * before) as usize;
        AttnShape::new([batch, q_len, kv_heads * group, head_dim], [k_len, kv_heads]).unwrap()
    }
}

prop_compose! {
    fn configs()(
        tile in prop_oneof![Just(16usize), Just(32), Just(48)],
        tile_k in prop_oneof![Just(16usize), Just(32)],
        segment_tiles in 1..4usize,
        tau in prop_oneof![Just(0.0f32), 0.001..0.3f32],
        stop_rule in prop_oneof![
            Just(StopRule::AllRows),
            Just(StopRule::MeanRatio),
            Just(StopRule::SumRatio),
            Just(StopRule::MaxWeight),
            Just(StopRule::MeanWeight),
        ],
        gain_frame in prop_oneof![3 => Just(GainFrame::NewMax), 1 => Just(GainFrame::Literal)],
        keep in any::<bool>(),
        key_score in prop_oneof![Just(KeyScore::MeanQuery), (0.0..1.0f32).prop_map(|c| KeyScore::SecondCumulant { c })],
        front_sink in prop_oneof![Just(0usize), Just(4), Just(40)],
        recent in prop_oneof![Just(0usize), Just(1), Just(60), Just(400)],
        dense_tail in prop_oneof![Just(0usize), 1..80usize],
        q_perm in any::<bool>(),
    ) -> S2oConfig {
        S2oConfig::builder()
            .tile_q(tile)
            .tile_k(tile_k)
            .segment_len(SegmentLen::Fixed(segment_tiles * 96))
            .tau(tau)
            .stop_rule(stop_rule)
            .gain_frame(gain_frame)
            .triggering_tile(if keep { TriggeringTile::Keep } else { TriggeringTile::Discard })
            .key_score(key_score)
            .front_sink(front_sink)
            .recent(recent)
            .dense_tail(dense_tail)
            .q_perm(q_perm)
            .dense_below(0)
            .build()
            .unwrap()
    }
}

prop_compose! {
    /// Any supported call, small enough for the f64 reference.
    pub fn cases()(
        shape in shapes(),
        config in configs(),
        is_last in any::<bool>(),
        more in 0..500usize,
        seed in any::<u32>(),
        sharpness in 0.5..8.0f32,
        softcap in prop_oneof![3 => Just(None), 1 => (0.5..60.0f32).prop_map(Some)],
    ) -> Case {
        let prompt_len = if is_last { shape.k_len() } else { shape.k_len() + more };
        let [q, k, v] = tensors(&shape, u64::from(seed), sharpness);
        Case { shape, config, prompt_len, softcap, q, k, v }
    }
}
