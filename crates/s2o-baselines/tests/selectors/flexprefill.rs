//! FlexPrefill against its definition, one head at a time in f64.

use candle_core::{DType, Device, Tensor};
use candle_s2o::BLOCK_Q;
use proptest::prelude::*;
use s2o_baselines::{FlexPattern, FlexPrefill, block_means};

use crate::inputs::{Inputs, ascending, assert_causal, assert_dense, calls};
use crate::plain::{Compared, PlainHead, any, block_sums, count_to, top_cdf, top_k};
use crate::vectors;

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
    let estimate = head.pooled_row(head.q.len().saturating_sub(BLOCK_Q)..head.q.len(), &head.k);
    let divergence = |from: &[f64], other: &[f64]| -> f64 {
        let terms = from.iter().zip(other).filter(|(p, _)| **p > 0.0);
        terms.map(|(p, q)| p * (p / ((p + q) / 2.0)).ln()).sum()
    };
    ((divergence(&truth, &estimate) + divergence(&estimate, &truth)) / 2.0).max(0.0).sqrt()
}

fn compare(inputs: &Inputs, settings: Settings) -> Compared {
    let selector = settings.selector();
    let patterns = selector.patterns(&inputs.call, &inputs.tensors[0], &inputs.tensors[1]).unwrap();
    inputs.compare(&inputs.select(&selector), |number, head| {
        let distance = distance(head);
        let query_aware = patterns[number] == FlexPattern::QueryAware;
        assert!(query_aware == (distance < settings.tau) || (distance - settings.tau).abs() < 1e-3, "{distance}");
        let budget = settings.min_budget.div_ceil(BLOCK_Q).max(1);
        let chosen = |tokens: &[f64]| {
            let counts = count_to(tokens, settings.gamma);
            let blocks = |count: usize| if query_aware { budget } else { (count / BLOCK_Q + 1).max(budget) };
            let mut sums = block_sums(tokens);
            sums[0] += 2.0;
            top_k(&sums, (blocks(counts.0), blocks(counts.1)))
        };
        let (keys, distances) = head.last_queries(BLOCK_Q);
        let (verticals, slashes) = (chosen(&keys), chosen(&distances));
        let mut pooled = top_cdf(&head.pooled().concat(), |_| false, settings.gamma).into_iter();
        let rows = head.query_blocks().map(|(block, _)| {
            let row = pooled.by_ref().take(block + 1).enumerate();
            let decided = row.map(|(key_block, pooled)| {
                let pooled = if query_aware { pooled } else { Some(false) };
                any([verticals[key_block], slashes[block - key_block], pooled])
            });
            let decided: Vec<_> = decided.collect();
            assert_eq!((decided[0], decided[block]), (Some(true), Some(true)), "the first block and the diagonal");
            decided
        });
        rows.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn blocks_of_the_definition(
        call in calls(), gamma in 0.3..0.99f64, tau in prop_oneof![Just(0.1), 0.0..0.8f64], budget in 0..600usize,
    ) {
        compare(&call, Settings { gamma, tau, min_budget: budget }).assert_decided(4, 20);
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        assert_dense(&call, FlexPrefill::default().gamma(1.0).unwrap());
        assert_dense(&call, FlexPrefill::default().min_budget(call.shape.k_len()));
    }

    #[test]
    fn queries_see_no_later_key(call in calls()) {
        assert_causal(&call, &FlexPrefill::default().min_budget(128));
    }
}

#[test]
fn real_tensors() {
    for inputs in vectors::smollm2() {
        for (gamma, tau, min_budget) in [(0.9, 0.1, 1024), (0.9, 0.1, 128), (0.9, 1.0, 128), (0.6, 0.0, 256)] {
            let settings = Settings { gamma, tau, min_budget };
            for inputs in [inputs.clone(), inputs.in_dtype(DType::BF16)] {
                compare(&inputs, settings).assert_decided(1, 50);
            }
        }
    }
    // The budget alone is eight of the twelve key blocks.
    let [density, _, l1] = vectors::measure(FlexPrefill::default());
    assert!(density < 0.85 && l1 < 0.01, "{density} {l1}");
    let [density, _, l1] = vectors::measure(FlexPrefill::default().min_budget(128));
    assert!(density < 0.35 && l1 < 0.1, "{density} {l1}");
}

#[test]
fn keys_and_distances_are_counted_in_whole_blocks_plus_1() {
    // Queries of zeros attend to all keys alike: 0.27 of them are 4.3 of 16 blocks.
    let Inputs { shape, call, tensors: [q, k, v] } = Inputs::random([1, 2048, 1, 16], [2048, 1], 1);
    let inputs = Inputs { shape, call, tensors: [q.zeros_like().unwrap(), k, v] };
    let selection = inputs.select(&Settings { gamma: 0.27, tau: 0.0, min_budget: 0 }.selector());
    assert_eq!(ascending(&selection, 15), [0, 1, 2, 3, 4, 11, 12, 13, 14, 15]);
}

#[test]
fn means_of_many_tokens_are_made_in_parts() {
    // Two blocks of 2 x 8192 x 1024 elements are more than one part holds.
    let x = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap();
    let x = x.reshape((1, 6, 1, 1)).unwrap().broadcast_as((1, 6, 8192, 1024)).unwrap();
    let means = block_means(&x, 1, 2).unwrap();
    let means = means.narrow(1, 8191, 1).unwrap().narrow(3, 1023, 1).unwrap().flatten_all().unwrap();
    assert_eq!(means.to_vec1::<f32>().unwrap(), [0.0, 1.5, 3.5, 5.0]);
}
