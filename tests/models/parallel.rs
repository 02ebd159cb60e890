//! A decoder that several ranks run gives the results of one rank.

use std::sync::Arc;

use candle_core::Tensor;
use candle_s2o::{Attention, AttnStats, Dense, ProbeStride, S2o, S2oConfig, SegmentLen};
use s2o_comm::{CommError, Group, Tcp};
use s2o_models::parallel::Mode;
use s2o_models::{Decoder, DecoderOptions, HeadTiles, LoadOptions, ModelError, ModelSource, Parallel, PrefillOptions};
use s2o_testkit::ranks::run;
use serde_json::{Value, json};

use crate::fixtures::*;

/// Sums over heads and columns are in another order.
const TOLERANCE: f32 = 5e-5;

fn load(json: &Value, mode: Mode, group: Arc<Group>) -> Result<Decoder, ModelError> {
    let parallel = Parallel::new(mode, Arc::new(Tcp::new(group)));
    Decoder::load_with(&config(json), &builder(&weights(json, 7)), on_ranks(parallel), None)
}

fn on_ranks(parallel: Parallel) -> DecoderOptions {
    DecoderOptions { parallel: Some(parallel), ..DecoderOptions::default() }
}

/// Llama and Qwen3 with four KV heads, and with every bias.
fn models() -> [Value; 2] {
    let heads = json!({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16});
    let biases = json!({"attention_bias": true, "mlp_bias": true});
    [with(with(llama_json(), heads.clone()), biases), with(with(qwen3_json(), heads), json!({"attention_bias": true}))]
}

/// S2O that ranks and stops at these lengths.
fn s2o() -> S2o {
    let config = S2oConfig::builder()
        .tile_q(16)
        .tile_k(8)
        .segment_len(SegmentLen::Fixed(32))
        .tau(0.3)
        .recent(4)
        .probe_stride(ProbeStride::Every(16))
        .dense_tail(8)
        .dense_below(32);
    S2o::new(config.build().unwrap()).with_stats()
}

/// Logits of the last 70 positions of a prompt in chunks, and those of some decoded tokens.
fn results(decoder: &Decoder, batch: usize, attention: &dyn Attention) -> [Tensor; 2] {
    let prompt = tokens(batch, 150, 288);
    let mut cache = decoder.new_cache(batch, 160).unwrap();
    // The last chunk has too few tokens to shard.
    let options = PrefillOptions::new().chunk(69).num_logits(70);
    let out = decoder.prefill(&prompt, &mut cache, attention, options).unwrap();
    assert_eq!(out.hidden.dims(), [batch, 64]);
    let decoded: Vec<Tensor> =
        (0..5).map(|i| decoder.decode(&tokens(batch, 20, 288).narrow(1, i, 1).unwrap(), &mut cache).unwrap()).collect();
    [out.logits, Tensor::stack(&decoded, 1).unwrap()]
}

#[test]
fn logits_are_those_of_one_rank() {
    for json in models() {
        let one = decoder(&json, 7);
        for attention in [&Dense as &dyn Attention, &s2o()] {
            for batch in [1, 2] {
                let expected = results(&one, batch, attention);
                for (mode, count) in [(Mode::Sequence, 2), (Mode::Sequence, 4), (Mode::Tensor, 2), (Mode::Tensor, 4)] {
                    let all = run(count, |group| {
                        let decoder = load(&json, mode, group).unwrap();
                        assert_eq!(decoder.parallel().unwrap().mode(), mode);
                        results(&decoder, batch, attention)
                    });
                    for got in &all {
                        for (got, expected) in got.iter().zip(&expected) {
                            let apart = max_diff(got, expected);
                            assert!(apart < TOLERANCE, "{mode}, {count} ranks, batch {batch}: {apart}");
                        }
                    }
                    // Sampling goes the same way on all ranks.
                    assert!(all.iter().all(|got| values(&got[0]) == values(&all[0][0])), "{mode}, {count} ranks");
                    assert!(all.iter().all(|got| values(&got[1]) == values(&all[0][1])), "{mode}, {count} ranks");
                }
            }
        }
    }
}

#[test]
fn parts_of_files_give_the_results_of_whole_tensors() {
    for json in models() {
        let directory = tempfile::tempdir().unwrap();
        write_sharded(directory.path(), &json, &weights(&json, 7));
        for (mode, count) in [(Mode::Sequence, 2), (Mode::Tensor, 2), (Mode::Tensor, 4)] {
            run(count, |group| {
                let parallel = Parallel::new(mode, Arc::new(Tcp::new(Arc::clone(&group))));
                let options = LoadOptions { parallel: Some(parallel), ..LoadOptions::default() };
                let model = ModelSource::Directory(directory.path().to_owned()).load(&options, None).unwrap();
                let got = results(&model.decoder, 1, &s2o());
                let expected = results(&load(&json, mode, group).unwrap(), 1, &s2o());
                assert_eq!(values(&got[0]), values(&expected[0]), "{mode}, {count} ranks");
                assert_eq!(values(&got[1]), values(&expected[1]), "{mode}, {count} ranks");
            });
        }
    }
}

#[test]
fn every_rank_attends_with_whole_heads_to_all_tokens() {
    let json = &models()[0];
    let one = s2o();
    results(&decoder(json, 7), 1, &one);
    let expected = one.take_stats().unwrap();
    let all = run(4, |group| {
        let (decoder, s2o) = (load(json, Mode::Sequence, group).unwrap(), s2o());
        results(&decoder, 1, &s2o);
        s2o.take_stats().unwrap()
    });
    for (layer, expected) in expected {
        assert!(expected.density() < 0.9, "S2O must skip something here");
        let heads: Vec<_> = all.iter().flat_map(|rank| rank[&layer].heads.clone()).collect();
        assert_eq!(heads.len(), expected.heads.len());
        for (head, expected) in heads.iter().zip(&expected.heads) {
            // Orders and stops are those of one rank.
            assert_eq!(head.tiles, expected.tiles, "layer {layer}");
            assert!(!expected.probes.is_empty() && head.probes.len() == expected.probes.len(), "layer {layer}");
            for (probes, expected) in head.probes.iter().zip(&expected.probes) {
                // A CPU rounds the projections of some heads and of all differently.
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-3 * b.abs().max(1e-3);
                assert_eq!(
                    [probes.segment, probes.rows, probes.probes],
                    [expected.segment, expected.rows, expected.probes]
                );
                assert!(near(probes.norm, expected.norm) && near(probes.skipped_mass, expected.skipped_mass));
                assert!(near(probes.corrected, expected.corrected), "layer {layer}: {probes:?}, {expected:?}");
            }
        }
    }
}

/// Work by which two ranks have the heads 0 and 2, and 1 and 3, in the first layer, and another choice in the second.
fn unequal(json: &Value) -> HeadTiles {
    let layers = config(json).num_layers;
    let of_layer = |layer: usize| if layer.is_multiple_of(2) { [9.0, 8.0, 1.0, 2.0] } else { [9.0, 7.0, 5.0, 1.0] };
    serde_json::from_value(json!({"by_layer": (0..layers).map(of_layer).collect::<Vec<_>>()})).unwrap()
}

#[test]
fn heads_of_equal_work_give_the_results_of_one_rank() {
    for json in models() {
        let one = s2o();
        let expected = results(&decoder(&json, 7), 2, &one);
        let expected_stats = one.take_stats().unwrap();
        let expected_tiles = HeadTiles::of(&expected_stats, &config(&json));
        // Two query heads share a KV head, and two sequences have eight heads each.
        let of_kv_head = |stats: &AttnStats, head: usize| -> f64 {
            [0, 1, 8, 9].map(|first| stats.heads[2 * head + first].tiles_computed()).iter().sum()
        };
        let by_hand: Vec<[f64; 4]> =
            expected_stats.values().map(|stats| [0, 1, 2, 3].map(|head| of_kv_head(stats, head))).collect();
        assert_eq!(serde_json::to_value(&expected_tiles).unwrap(), json!({"by_layer": by_hand}));
        let directory = tempfile::tempdir().unwrap();
        write_sharded(directory.path(), &json, &weights(&json, 7));
        for mode in [Mode::Sequence, Mode::Tensor] {
            run(2, |group| {
                let parallel = Parallel::new(mode, Arc::new(Tcp::new(group))).balanced(unequal(&json));
                let options = on_ranks(parallel.clone());
                let whole = Decoder::load_with(&config(&json), &builder(&weights(&json, 7)), options, None).unwrap();
                let options = LoadOptions { parallel: Some(parallel.clone()), ..LoadOptions::default() };
                let parts = ModelSource::Directory(directory.path().to_owned()).load(&options, None).unwrap().decoder;
                for decoder in [&whole, &parts] {
                    let s2o = s2o();
                    for (got, expected) in results(decoder, 2, &s2o).iter().zip(&expected) {
                        let apart = max_diff(got, expected);
                        assert!(apart < TOLERANCE, "{mode}: {apart}");
                    }
                    let stats = parallel.all_heads(&s2o.take_stats().unwrap(), decoder.config()).unwrap();
                    let tiles = HeadTiles::of(&stats, decoder.config());
                    assert_eq!(tiles, expected_tiles, "{mode}");
                    for (layer, expected) in &expected_stats {
                        let heads = stats[layer].heads.iter().zip(&expected.heads);
                        assert!(stats[layer].num_heads == 8 && stats[layer].heads.len() == 16);
                        assert!(heads.into_iter().all(|(head, expected)| head.tiles == expected.tiles), "{mode}");
                    }
                    // By the work that these placements were made for, the ranks are even: 10 and 10, 12 and 10.
                    let busiest = parallel.busiest(&unequal(&json));
                    assert!((1.0..1.1).contains(&busiest), "{busiest}");
                }
            });
        }
    }
}

#[test]
fn attention_of_some_heads_is_bit_for_bit_that_of_all() {
    let [q, k, v] =
        [8, 4, 4].map(|heads| s2o_testkit::tensor(&[1, 200, heads, 16], heads as u64, candle_core::DType::F32));
    let call = candle_s2o::PrefillCall { layer: 0, softmax_scale: 0.25, prompt_len: 200 };
    let whole = s2o().prefill(&call, &q, &k, &v).unwrap();
    for rank in 0..4 {
        let part = |x: &Tensor, heads: usize| x.narrow(2, rank * heads, heads).unwrap();
        let out = s2o().prefill(&call, &part(&q, 2), &part(&k, 1), &part(&v, 1)).unwrap();
        assert_eq!(values(&out), values(&part(&whole, 2)), "rank {rank}");
    }
}

#[test]
fn needle_11m_answers_as_on_one_rank() {
    let records = s2o_models::passkey::records().unwrap();
    let answer = |parallel: Option<Parallel>| {
        let options = LoadOptions { parallel, ..Default::default() };
        let model = ModelSource::Embedded.load(&options, None).unwrap();
        let tokens = model.encode(&records[0].input).unwrap();
        let tokens = &tokens[tokens.len().saturating_sub(900)..];
        let mut cache = model.decoder.new_cache(1, tokens.len() + 24).unwrap();
        let options = s2o_models::GenerationOptions { max_new_tokens: 24, ..Default::default() };
        let prefill = PrefillOptions::new().chunk(400);
        model.generate(tokens, &mut cache, &Dense, prefill, &options, &mut |_| ()).unwrap().tokens
    };
    let expected = answer(None);
    assert!(!expected.is_empty());
    for mode in [Mode::Sequence, Mode::Tensor, Mode::Auto] {
        let all = run(2, |group| answer(Some(Parallel::new(mode, Arc::new(Tcp::new(group))))));
        assert_eq!(all, [expected.clone(), expected.clone()], "{mode}");
    }
}

#[test]
fn one_rank_is_one_device() {
    let json = &models()[1];
    let expected = results(&decoder(json, 7), 1, &s2o());
    for mode in [Mode::Sequence, Mode::Tensor, Mode::Auto] {
        let all = run(1, |group| results(&load(json, mode, group).unwrap(), 1, &s2o()));
        assert_eq!(values(&all[0][0]), values(&expected[0]), "{mode}");
        assert_eq!(values(&all[0][1]), values(&expected[1]), "{mode}");
    }
}

/// The errors of all ranks.
fn refused(count: usize, load: impl Fn(usize, Arc<Group>) -> Result<Decoder, ModelError> + Sync) -> Vec<String> {
    run(count, |group| load(group.rank(), group).unwrap_err().to_string())
}

#[test]
fn ranks_that_do_not_fit_are_refused_on_every_rank() {
    for (changes, expected) in [
        (json!({"num_key_value_heads": 2}), "number of ranks: expected a divisor of the model's 2 KV heads, got 4"),
        (
            json!({"intermediate_size": 126}),
            "number of ranks: expected a divisor of the model's 126 columns of an MLP, got 4",
        ),
    ] {
        let json = with(models()[0].clone(), changes);
        assert_eq!(refused(4, |_, group| load(&json, Mode::Sequence, group)), vec![expected; 4]);
    }

    let other = with(models()[0].clone(), json!({"rope_theta": 20000.0}));
    let both = [models()[0].clone(), other];
    let errors = refused(2, |rank, group| load(&both[rank], Mode::Tensor, group));
    assert!(
        errors[0].starts_with("the model's configuration: expected") && errors[0].contains("on rank 1"),
        "{errors:?}"
    );
    assert_eq!(errors[0], errors[1]);

    let modes = [Mode::Tensor, Mode::Sequence];
    let errors = refused(2, |rank, group| load(&models()[0], modes[rank], group));
    let expected = r#"what the ranks share: expected "tensor" on rank 1 as on rank 0, got "sequence""#;
    assert_eq!(errors, [expected; 2]);

    let json = &models()[0];
    let balanced = |by_layer: Value, group| {
        let tiles = serde_json::from_value(json!({"by_layer": by_layer})).unwrap();
        let parallel = Parallel::new(Mode::Sequence, Arc::new(Tcp::new(group))).balanced(tiles);
        Decoder::load_with(&config(json), &builder(&weights(json, 7)), on_ranks(parallel), None)
    };
    let even = [1.0; 4];
    for (by_layer, expected) in [
        (json!([[1.0, 2.0, 3.0, 4.0]]), "tiles of the heads: expected 2 layers, got 1"),
        (json!([[1.0, 2.0], [1.0, 2.0]]), "tiles of the heads: expected 4 KV heads in layer 0, got 2"),
        (json!([even, [1.0, -2.0, 1.0, 1.0]]), "tiles of the heads: expected numbers of tiles in layer 1, got -2"),
    ] {
        assert_eq!(refused(2, |_, group| balanced(by_layer.clone(), group)), [expected; 2]);
    }
    let errors = refused(2, |rank, group| balanced(json!([even, [rank as f64, 1.0, 1.0, 1.0]]), group));
    assert!(errors[0].starts_with("the tiles of the heads: expected"), "{errors:?}");

    let errors = refused(2, |rank, group| {
        let parallel = Parallel::new(Mode::Tensor, Arc::new(Tcp::new(group)));
        Decoder::load_with(&config(json), &builder(&weights(json, rank as u64)), on_ranks(parallel), None)
    });
    assert!(errors[0].starts_with("the model's weights: expected"), "{errors:?}");
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn a_rank_that_gives_up_ends_the_others() {
    let json = &models()[0];
    let all = run(2, |group| {
        let decoder = load(json, Mode::Sequence, Arc::clone(&group)).unwrap();
        if group.rank() == 1 {
            group.abort("its disk is full");
            return None;
        }
        let mut cache = decoder.new_cache(1, 150).unwrap();
        let error = decoder.prefill(&tokens(1, 150, 288), &mut cache, &Dense, PrefillOptions::new()).unwrap_err();
        assert_eq!(cache.len(), 0);
        Some(error)
    });
    match &all[0] {
        Some(ModelError::Ranks(CommError::GaveUp { rank: 1, reason })) => assert_eq!(reason, "its disk is full"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cache_of_all_heads_does_not_fit_a_rank() {
    let json = &models()[0];
    let mut whole = decoder(json, 7).new_cache(1, 40).unwrap();
    let whole = std::sync::Mutex::new(&mut whole);
    run(2, |group| {
        let decoder = load(json, Mode::Tensor, group).unwrap();
        let mut cache = whole.lock().unwrap();
        let error = decoder.prefill(&tokens(1, 40, 288), &mut cache, &Dense, PrefillOptions::new()).unwrap_err();
        assert_eq!(error.to_string(), "KV heads of the KV cache: expected 2, got 4");
    });
}
