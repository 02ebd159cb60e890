//! FlexPrefill against its definition, one head at a time in f64.

use candle_s2o::BLOCK_Q;
use proptest::prelude::*;
use s2o_baselines::{FlexPattern, FlexPrefill, block_means};

use crate::agreement::{
    Bracket, Inputs, PlainHead, assert_blocks, assert_causal, assert_dense, block_sums, dot, mean, softmax,
};
use crate::plain::calls;
use crate::smollm2;

#[derive(Debug, Clone, Copy)]
struct Settings {
    gamma: f64,
    tau: f64,
    min_budget: usize,
}

impl Settings {
    fn selector(self) -> FlexPrefill {
        FlexPrefill::default().gamma(self.gamma).unwrap().tau(self.tau).unwrap().min_budget(self.min_budget)
    }
}

/// Square root of the Jensen-Shannon divergence between the last queries' attention to blocks and its estimate.
fn distance(head: &PlainHead) -> f64 {
    let truth = block_sums(&head.last_queries(BLOCK_Q).0);
    let query = mean(&head.q[head.q.len().saturating_sub(BLOCK_Q)..]);
    let scores: Vec<f64> = head.k.chunks(BLOCK_Q).map(|keys| head.scale * dot(&query, &mean(keys))).collect();
    let estimate = softmax(&scores);
    let divergence = |from: &[f64], other: &[f64]| -> f64 {
        let terms = from.iter().zip(other).filter(|(p, _)| **p > 0.0);
        terms.map(|(p, q)| p * (p / ((p + q) / 2.0)).ln()).sum()
    };
    ((divergence(&truth, &estimate) + divergence(&estimate, &truth)) / 2.0).max(0.0).sqrt()
}

/// Returns the numbers of undecided blocks and of all blocks.
fn compare(inputs: &Inputs, settings: Settings) -> (usize, usize) {
    let selector = settings.selector();
    let selection = inputs.select(&selector);
    let patterns = selector.patterns(&inputs.call, &inputs.tensors[0], &inputs.tensors[1]).unwrap();
    let (plain, mut undecided, mut all) = (inputs.in_f32(), 0, 0);
    for (number, at) in inputs.heads().enumerate() {
        let head = plain.head(at);
        let distance = distance(&head);
        let query_aware = patterns[number] == FlexPattern::QueryAware;
        assert!(query_aware == (distance < settings.tau) || (distance - settings.tau).abs() < 1e-3, "{distance}");
        let budget = settings.min_budget.div_ceil(BLOCK_Q).max(1);
        let chosen = |tokens: &[f64]| {
            let counts = Bracket::count_to(tokens, settings.gamma);
            let blocks = |count: usize| if query_aware { budget } else { (count / BLOCK_Q + 1).max(budget) };
            let mut sums = block_sums(tokens);
            sums[0] += 2.0;
            Bracket::top_k(&sums, (blocks(counts.0), blocks(counts.1)))
        };
        let (keys, distances) = head.last_queries(BLOCK_Q);
        let (verticals, slashes) = (chosen(&keys), chosen(&distances));
        let pooled = head.pooled();
        let (rows, columns) = (pooled.len(), pooled[0].len());
        let pooled = Bracket::top_cdf(&pooled.concat(), settings.gamma);
        let first = inputs.shape.q_offset() / BLOCK_Q;
        undecided += assert_blocks(inputs, &selection, number, |row, key_block| {
            let (distance, cell) = (first + row - key_block, row * columns + key_block);
            let must = verticals.must[key_block] || slashes.must[distance] || query_aware && pooled.must[cell];
            let may = verticals.may[key_block] || slashes.may[distance] || query_aware && pooled.may[cell];
            assert!(must || key_block > 0 && distance > 0, "the first block and the diagonal are forced");
            (must, may)
        });
        all += rows * columns;
    }
    (undecided, all)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn blocks_of_the_definition(
        call in calls(), gamma in 0.3..0.99f64, tau in prop_oneof![Just(0.1), 0.0..0.8f64], budget in 0..600usize,
    ) {
        let (undecided, all) = compare(&call.into(), Settings { gamma, tau, min_budget: budget });
        prop_assert!(undecided <= 4 + all / 20, "{undecided} of {all}");
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(&call.into(), FlexPrefill::default().gamma(1.0).unwrap());
        assert_dense(&call.into(), FlexPrefill::default().min_budget(call.shape.k_len()));
    }

    #[test]
    fn queries_see_no_later_key(call in calls()) {
        assert_causal(&call.into(), &FlexPrefill::default().min_budget(128));
    }
}

#[test]
fn real_tensors() {
    for inputs in smollm2::calls() {
        for (gamma, tau, min_budget) in [(0.9, 0.1, 1024), (0.9, 0.1, 128), (0.9, 1.0, 128), (0.6, 0.0, 256)] {
            let settings = Settings { gamma, tau, min_budget };
            for inputs in [inputs.clone(), inputs.in_bf16()] {
                let (undecided, all) = compare(&inputs, settings);
                assert!(undecided <= 1 + all / 50, "{settings:?}: {undecided} of {all}");
            }
        }
    }
    // The budget alone is eight of the twelve key blocks.
    let [density, _, l1] = smollm2::measure(&FlexPrefill::default());
    assert!(density < 0.85 && l1 < 0.01, "{density} {l1}");
    let [density, _, l1] = smollm2::measure(&FlexPrefill::default().min_budget(128));
    assert!(density < 0.35 && l1 < 0.1, "{density} {l1}");
}

#[test]
fn means_of_many_tokens_are_made_in_parts() {
    // Two blocks of 2 x 8192 x 1024 elements are more than one part holds.
    let x = candle_core::Tensor::arange(0f32, 6.0, &candle_core::Device::Cpu).unwrap();
    let x = x.reshape((1, 6, 1, 1)).unwrap().broadcast_as((1, 6, 8192, 1024)).unwrap();
    let means = block_means(&x, 1, 2).unwrap();
    let means = means.narrow(1, 8191, 1).unwrap().narrow(3, 1023, 1).unwrap().flatten_all().unwrap();
    assert_eq!(means.to_vec1::<f32>().unwrap(), [0.0, 1.5, 3.5, 5.0]);
}

#[test]
fn bad_options_are_refused() {
    let message = |refused: Result<FlexPrefill, s2o_baselines::BaselineError>| refused.unwrap_err().to_string();
    let flex = FlexPrefill::default();
    assert_eq!(message(flex.gamma(0.0)), "flexprefill: gamma: expected above 0, up to 1, got 0");
    assert_eq!(message(flex.gamma(f64::NAN)), "flexprefill: gamma: expected above 0, up to 1, got NaN");
    assert_eq!(message(flex.tau(1.5)), "flexprefill: tau: expected 0 to 1, got 1.5");
}
