//! MInference against its definition, one head at a time in f64.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{BLOCK_Q, Mask, PrefillCall, query_blocks};
use proptest::prelude::*;
use s2o_baselines::{BlockSelector, HeadPattern, MInference, MInferenceConfig, Selection, TuningCall};

use crate::inputs::{Inputs, ascending, assert_causal, assert_dense, calls, lists};
use crate::plain::{Compared, any, top_k};
use crate::vectors;

fn fixed(patterns: &[HeadPattern]) -> MInference {
    MInference::from_config(MInferenceConfig { layers: [(0, patterns.to_vec())].into() }).unwrap()
}

fn pattern() -> impl Strategy<Value = HeadPattern> {
    prop_oneof![
        (0..600usize, 1..900usize).prop_map(|(sink, window)| HeadPattern::AShape { sink, window }),
        (0..400usize, 0..400usize).prop_map(|(verticals, slashes)| HeadPattern::VerticalSlash { verticals, slashes }),
        (1..10usize).prop_map(|blocks| HeadPattern::BlockSparse { blocks }),
    ]
}

/// The single keys that a head takes.
fn columns(selection: &Selection, number: usize) -> Vec<usize> {
    let columns = lists(selection).columns.as_ref();
    columns.map_or_else(Vec::new, |columns| columns[number].iter().map(|&key| key as usize).collect())
}

/// Compares blocks and columns.
fn compare(inputs: &Inputs, patterns: &[HeadPattern]) -> Compared {
    let selection = inputs.select(&fixed(patterns));
    let k_len = inputs.shape.k_len();
    let mut of_columns = Compared::default();
    let of_blocks = inputs.compare(&selection, |number, head| {
        let mut keys = vec![Some(false); k_len];
        // By query block and key block.
        let decided: Box<dyn Fn(usize, usize) -> Option<bool>> = match patterns[number % patterns.len()] {
            HeadPattern::AShape { sink, window } => Box::new(move |block, key_block| {
                // Position by position: the keys that any query of the whole block sees.
                let seen = (block * BLOCK_Q..(block + 1) * BLOCK_Q).any(|position| {
                    (key_block * BLOCK_Q..(key_block + 1) * BLOCK_Q)
                        .any(|key| key <= position && (key < sink || key + window > position))
                });
                Some(seen || key_block == block)
            }),
            HeadPattern::VerticalSlash { verticals, slashes } => {
                let (mut of_keys, mut of_distances) = head.last_queries(64);
                of_keys.iter_mut().take(30).for_each(|mass| *mass += 2.0);
                of_distances.iter_mut().take(100).for_each(|mass| *mass += 2.0);
                let (verticals, slashes) = (verticals.max(30), slashes.max(100));
                keys = top_k(&of_keys, (verticals, verticals));
                let distances = top_k(&of_distances, (slashes, slashes));
                // The query at `position` sees the key at this distance, if the key exists.
                Box::new(move |block, key_block| {
                    let (queries, keys) = (block * BLOCK_Q, key_block * BLOCK_Q);
                    let reach = (queries + BLOCK_Q - keys).min(k_len);
                    let nearest = (queries + 1).saturating_sub(keys + BLOCK_Q);
                    any((nearest..reach).map(|distance| distances[distance]))
                })
            }
            HeadPattern::BlockSparse { blocks } => {
                let rows: Vec<_> = head.pooled().iter().map(|scores| top_k(scores, (blocks, blocks))).collect();
                let first = head.offset() / BLOCK_Q;
                Box::new(move |block, key_block| any([rows[block - first][key_block], Some(key_block == block)]))
            }
        };
        of_columns.list(&columns(&selection, number), &keys, &format_args!("keys of head {number}"));
        head.query_blocks().map(|(block, _)| (0..=block).map(|key| decided(block, key)).collect()).collect()
    });
    Compared { all: of_blocks.all + of_columns.all, open: of_blocks.open + of_columns.open }
}

/// The share of the attention of 64 queries, spread over the call, that a head captures; mean over the batch.
fn captured(inputs: &Inputs, selection: &Selection, number: usize) -> f64 {
    let shape = &inputs.shape;
    let samples = shape.q_len().min(64);
    let blocks = query_blocks(shape, Mask::Causal).len();
    let mut sum = 0.0;
    for i in (number..inputs.num_heads()).step_by(shape.num_heads()) {
        let (head, columns) = (inputs.head(i), columns(selection, i));
        for sample in 1..=samples {
            let row = sample * shape.q_len() / samples - 1;
            let block = (shape.q_offset() + row) / BLOCK_Q - shape.q_offset() / BLOCK_Q;
            let list = ascending(selection, i * blocks + block);
            let seen = |key: usize| list.binary_search(&(key / BLOCK_Q)).is_ok() || columns.binary_search(&key).is_ok();
            let attention = head.attention(row);
            sum += (0..attention.len()).filter(|&key| seen(key)).map(|key| attention[key]).sum::<f64>();
        }
    }
    sum / (samples * shape.batch()) as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn keys_of_the_definition(call in calls(), patterns in proptest::collection::vec(pattern(), 4)) {
        compare(&call, &patterns[..call.shape.num_heads()]).assert_decided(4, 20);
    }

    #[test]
    fn the_search_takes_what_captures_most(call in calls(), candidates in proptest::collection::vec(pattern(), 1..4)) {
        let method = MInference::default().candidates(candidates.clone()).unwrap().search_from(0);
        let found = call.select(&method);
        let config = method.config();
        for number in 0..call.shape.num_heads() {
            let with = |&candidate: &HeadPattern| {
                let selection = call.select(&fixed(&vec![candidate; call.shape.num_heads()]));
                captured(&call, &selection, number)
            };
            let best = candidates.iter().map(with).fold(0.0, f64::max);
            prop_assert!(candidates.contains(&config.layers[&0][number]));
            prop_assert!(captured(&call, &found, number) > best - 1e-4);
        }
        // The patterns found are kept, and select the same.
        let again = [call.select(&method), call.select(&MInference::from_config(config).unwrap())];
        prop_assert!(again.iter().all(|selection| lists(selection) == lists(&found)));
    }

    #[test]
    fn everything_is_dense(call in calls()) {
        let (k_len, heads) = (call.shape.k_len(), call.shape.num_heads());
        for pattern in [
            HeadPattern::AShape { sink: 0, window: k_len },
            HeadPattern::AShape { sink: k_len, window: 1 },
            HeadPattern::VerticalSlash { verticals: k_len, slashes: 0 },
            HeadPattern::VerticalSlash { verticals: 0, slashes: k_len },
            HeadPattern::BlockSparse { blocks: k_len },
        ] {
            assert_dense(&call, fixed(&vec![pattern; heads]));
        }
    }

    #[test]
    fn queries_see_no_later_key(call in calls(), patterns in proptest::collection::vec(pattern(), 4)) {
        assert_causal(&call, &fixed(&patterns[..call.shape.num_heads()]));
    }
}

#[test]
fn real_tensors() {
    for inputs in vectors::smollm2() {
        for pattern in [
            HeadPattern::AShape { sink: 128, window: 300 },
            HeadPattern::VerticalSlash { verticals: 50, slashes: 120 },
            HeadPattern::VerticalSlash { verticals: 300, slashes: 100 },
            HeadPattern::BlockSparse { blocks: 4 },
        ] {
            for inputs in [inputs.clone(), inputs.in_dtype(DType::BF16)] {
                compare(&inputs, &[pattern]).assert_decided(2, 50);
            }
        }
    }
    let vertical_slash = HeadPattern::VerticalSlash { verticals: 100, slashes: 200 };
    let [density, _, l1] = vectors::measure(fixed(&[vertical_slash]));
    assert!(density < 0.9 && l1 < 0.01, "{density} {l1}");
}

#[test]
fn short_prompts_decide_nothing() {
    let inputs = vectors::smollm2().swap_remove(0);
    let method = MInference::default();
    inputs.select(&method);
    assert_eq!(method.config(), MInferenceConfig::default());
    let method = method.search_from(1536);
    inputs.select(&method);
    assert_eq!(method.config().layers[&0].len(), 1);
}

#[test]
fn of_equally_good_candidates_the_first_is_taken() {
    let inputs = &vectors::smollm2()[0];
    let found = |candidates: [HeadPattern; 2]| {
        let method = MInference::default().candidates(candidates).unwrap().search_from(0);
        inputs.select(&method);
        method.config().layers[&0][0]
    };
    // These take everything, the last as single keys.
    let all = [
        HeadPattern::AShape { sink: 0, window: 1536 },
        HeadPattern::BlockSparse { blocks: 12 },
        HeadPattern::VerticalSlash { verticals: 1536, slashes: 100 },
    ];
    for candidate in all {
        for other in all {
            assert_eq!(found([candidate, other]), candidate);
        }
        assert_eq!(found([HeadPattern::AShape { sink: 0, window: 300 }, candidate]), candidate);
    }
}

#[test]
fn keys_without_attention_are_not_taken() {
    let filled = |value: f32, len: usize| Tensor::full(value, (1, len, 1, 16), &Device::Cpu).unwrap();
    // Scores of 0, and 200 for five keys: in f32 these have all the attention.
    let k = Tensor::cat(&[filled(0.0, 200), filled(50.0, 5), filled(0.0, 95)], 1).unwrap();
    let inputs = Inputs::new([filled(1.0, 300), k, filled(1.0, 300)]);
    let selection = inputs.select(&fixed(&[HeadPattern::VerticalSlash { verticals: 100, slashes: 100 }]));
    assert_eq!(columns(&selection, 0), (0..30).chain(200..205).collect::<Vec<_>>());
}

/// The whole prompt and a part of it as calls of `layer`.
fn tuning_calls(layer: usize) -> Vec<TuningCall> {
    let calls = vectors::smollm2().into_iter().take(2);
    calls
        .map(|Inputs { call, tensors: [q, k, v], .. }| TuningCall { call: PrefillCall { layer, ..call }, q, k, v })
        .collect()
}

#[test]
fn a_search_ahead_finds_what_a_call_does() {
    let candidates = HeadPattern::PUBLISHED.map(|pattern| pattern.scaled(0.05));
    let method = || MInference::default().candidates(candidates).unwrap().search_from(0);
    for call in tuning_calls(5) {
        let online = method();
        online.select(&call.call, &call.q, &call.k, &call.v).unwrap();
        assert_eq!(method().search(&[call]).unwrap(), online.config());
    }
    let both: Vec<TuningCall> = [tuning_calls(5), tuning_calls(2)].concat();
    let ahead = method();
    let config = ahead.search(&both).unwrap();
    assert_eq!(config.layers.keys().copied().collect::<Vec<_>>(), [2, 5]);
    assert_eq!(config.layers[&2], config.layers[&5]);
    assert_eq!(ahead.config(), MInferenceConfig::default());

    let mut other = both[0].clone();
    other.q = Tensor::cat(&[&other.q, &other.q], 2).unwrap();
    let error = ahead.search(&[both[0].clone(), other]).unwrap_err();
    assert_eq!(error.to_string(), "minference: layer 5: expected settings of 1 heads, got 2");
    assert_eq!(ahead.search(&[]).unwrap(), MInferenceConfig::default());
}

#[test]
fn a_pattern_is_dense_up_to_its_size() {
    let inputs = vectors::smollm2().swap_remove(0);
    for pattern in [
        HeadPattern::AShape { sink: 128, window: 1408 },
        HeadPattern::VerticalSlash { verticals: 30, slashes: 1536 },
        HeadPattern::VerticalSlash { verticals: 1536, slashes: 100 },
        HeadPattern::BlockSparse { blocks: 12 },
    ] {
        assert_eq!(pattern.dense_up_to(), inputs.shape.k_len());
        let [density, ..] = vectors::measure(fixed(&[pattern]));
        assert_eq!(density, 1.0, "{pattern:?}");
        // Half of all distances, scattered, still touch every block.
        let [density, ..] = vectors::measure(fixed(&[pattern.scaled(0.05)]));
        assert!(density < 1.0, "{pattern:?}: {density}");
    }
}

#[test]
fn a_configuration_is_json() {
    let patterns = vec![
        HeadPattern::AShape { sink: 1024, window: 4096 },
        HeadPattern::VerticalSlash { verticals: 30, slashes: 2048 },
        HeadPattern::BlockSparse { blocks: 50 },
    ];
    let config = MInferenceConfig { layers: [(0, patterns.clone()), (11, patterns)].into() };
    let json = serde_json::to_string(&config).unwrap();
    assert!(json.contains(r#""11":[{"pattern":"a-shape","sink":1024,"window":4096}"#), "{json}");
    assert_eq!(serde_json::from_str::<MInferenceConfig>(&json).unwrap(), config);
    assert_eq!(MInference::from_config(config.clone()).unwrap().config(), config);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("minference.json");
    config.save(&path).unwrap();
    assert_eq!(MInferenceConfig::load(&path).unwrap(), config);
    for (text, words) in [
        (r#"{"layers":{"0":[{"pattern":"block-sparse","blocks":5,"window":1}]}}"#, "unknown field `window`"),
        (r#"{"layers":{"0":[{"pattern":"checkers"}]}}"#, "unknown variant `checkers`"),
        (r#"{"layers":{},"version":2}"#, "unknown field `version`"),
        ("{}", "missing field `layers`"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = MInferenceConfig::load(&path).unwrap_err().to_string();
        let expected = "minference.json: expected patterns of MInference by layer and head, got ";
        assert!(error.contains(&format!("{expected}{words}")), "{error}");
    }
    let error = config.save(directory.path()).unwrap_err().to_string();
    assert!(error.starts_with("cannot write "), "{error}");
}

#[test]
fn patterns_of_other_heads_are_refused() {
    let Inputs { call, tensors: [q, k, v], .. } = vectors::smollm2().swap_remove(0);
    let two = fixed(&[HeadPattern::BlockSparse { blocks: 1 }; 2]);
    let error = two.select(&call, &q, &k, &v).unwrap_err();
    assert_eq!(error.to_string(), "minference: layer 0: expected settings of 1 heads, got 2");
}
