//! Chunking, caching and decoding do not change what is computed.

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_s2o::{Dense, PrefillCall};
use s2o_models::{Decoder, GenerationOptions, ModelError, PrefillOptions, StopReason, TokenStream};

use crate::fixtures::*;

const TOLERANCE: f32 = 5e-5;

#[test]
fn any_chunking_equals_the_whole() {
    for json in both() {
        let decoder = decoder(&json, 1);
        for batch in [1, 2] {
            let tokens = tokens(batch, 67, 288);
            let run = |chunk: Option<usize>| {
                let mut cache = decoder.new_cache(batch, 70).unwrap();
                let options = PrefillOptions::new().chunk(chunk).num_logits(20);
                let out = decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap();
                assert_eq!(out.logits.dims(), [batch, 20, 288]);
                assert_eq!(out.hidden.dims(), [batch, 64]);
                assert_eq!(cache.len(), 67);
                (out, cache.layer(1).unwrap())
            };
            let (whole, (k, v)) = run(None);
            for chunk in [1, 7, 16, 33, 66, 67, 500] {
                let (out, (k_chunked, v_chunked)) = run(Some(chunk));
                for (chunked, whole) in
                    [(out.logits, &whole.logits), (out.hidden, &whole.hidden), (k_chunked, &k), (v_chunked, &v)]
                {
                    assert!(max_diff(&chunked, whole) < TOLERANCE, "chunk {chunk}");
                }
            }
        }
    }
}

#[test]
fn decoding_equals_a_longer_prefill() {
    for json in both() {
        let decoder = decoder(&json, 2);
        for batch in [1, 2] {
            let tokens = tokens(batch, 40, 288);
            let mut cache = decoder.new_cache(batch, 64).unwrap();
            let options = PrefillOptions::new().num_logits(40);
            let whole = decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap().logits;
            cache.reset();
            let head = tokens.narrow(1, 0, 30).unwrap();
            decoder.prefill(&head, &mut cache, &Dense, PrefillOptions::new().chunk(11)).unwrap();
            for position in 30..40 {
                let ids = tokens.narrow(1, position, 1).unwrap();
                let step = decoder.decode(&ids, &mut cache).unwrap();
                cache.truncate(position);
                let of_ids = decoder.decode_ids(&ids.flatten_all().unwrap().to_vec1().unwrap(), &mut cache).unwrap();
                assert_eq!(max_diff(&step, &of_ids), 0.0, "batch {batch}, position {position}");
                let expected = whole.narrow(1, position, 1).unwrap().squeeze(1).unwrap();
                assert!(max_diff(&step, &expected) < TOLERANCE, "batch {batch}, position {position}");
            }
            assert_eq!(cache.len(), 40);
        }
    }
}

#[test]
fn last_logits_equal_those_of_shorter_prompts() {
    let decoder = decoder(&llama_json(), 3);
    let tokens = tokens(1, 50, 288);
    let mut cache = decoder.new_cache(1, 50).unwrap();
    let options = PrefillOptions::new().chunk(16).num_logits(37);
    let last = decoder.prefill(&tokens, &mut cache, &Dense, options).unwrap().logits;
    for len in [14, 15, 16, 17, 32, 33, 49, 50] {
        cache.reset();
        let shorter = tokens.narrow(1, 0, len).unwrap();
        let expected = decoder.prefill(&shorter, &mut cache, &Dense, PrefillOptions::new()).unwrap();
        let got = last.narrow(1, len - 14, 1).unwrap();
        assert!(max_diff(&got, &expected.logits) < TOLERANCE, "prompt of {len}");
    }
}

#[test]
fn sequences_prefilled_alone_decode_together() {
    for json in both() {
        let decoder = decoder(&json, 3);
        let tokens = tokens(3, 40, 288);
        let part = |first, len| tokens.narrow(1, first, len).unwrap();
        let mut whole = decoder.new_cache(3, 41).unwrap();
        decoder.prefill(&part(0, 39), &mut whole, &Dense, PrefillOptions::new()).unwrap();
        let expected = decoder.decode(&part(39, 1), &mut whole).unwrap();

        let mut cache = decoder.new_cache(3, 41).unwrap();
        for i in [2, 0, 1] {
            let mut own = cache.sequences(i..i + 1).unwrap();
            assert_eq!((own.batch(), own.len()), (1, 0));
            let prompt = part(0, 39).narrow(0, i, 1).unwrap();
            decoder.prefill(&prompt, &mut own, &Dense, PrefillOptions::new()).unwrap();
        }
        assert!(cache.is_empty());
        cache.set_len(39).unwrap();
        let mut last_two = cache.sequences(1..3).unwrap();
        let two = decoder.decode(&part(39, 1).narrow(0, 1, 2).unwrap(), &mut last_two).unwrap();
        assert!(max_diff(&two, &expected.narrow(0, 1, 2).unwrap()) < TOLERANCE);
        let three = decoder.decode(&part(39, 1), &mut cache).unwrap();
        assert!(max_diff(&three, &expected) < TOLERANCE);
        assert_eq!((cache.len(), last_two.len()), (40, 40));
    }
}

#[test]
fn parts_of_a_cache_that_cannot_be() {
    let mut cache = decoder(&llama_json(), 1).new_cache(2, 5).unwrap();
    for range in [0..0, 2..3, 0..3] {
        let error = cache.sequences(range.clone()).unwrap_err().to_string();
        assert!(error.ends_with(&format!("expected a part of 0..2, got {range:?}")), "{error}");
    }
    assert!(matches!(cache.set_len(6), Err(ModelError::CacheFull { expected: 5, got: 6 })));
    assert_eq!(cache.len(), 0);
    cache.set_len(5).unwrap();
    assert_eq!(cache.len(), 5);
}

#[test]
fn a_kept_prefix_is_not_computed_again() {
    let decoder = decoder(&qwen3_json(), 4);
    let prompt = tokens(1, 60, 288);
    let mut cache = decoder.new_cache(1, 60).unwrap();
    let whole = decoder.prefill(&prompt, &mut cache, &Dense, PrefillOptions::new()).unwrap();
    cache.truncate(25);
    assert_eq!((cache.len(), cache.is_empty()), (25, false));
    // Another end, then the first end again: nothing of the other may remain.
    let other = tokens(1, 90, 288).narrow(1, 60, 30).unwrap();
    decoder.prefill(&other, &mut cache, &Dense, PrefillOptions::new()).unwrap();
    cache.truncate(25);
    let rest = prompt.narrow(1, 25, 35).unwrap();
    let out = decoder.prefill(&rest, &mut cache, &Dense, PrefillOptions::new().chunk(10)).unwrap();
    assert!(max_diff(&out.logits, &whole.logits) < TOLERANCE);
}

#[test]
fn the_seam_sees_each_layer_and_the_prompts_length() {
    let decoder = decoder(&llama_json(), 5);
    let mut cache = decoder.new_cache(1, 32).unwrap();
    let noted = Mutex::new(Vec::new());
    let noting = Watched(|call: &PrefillCall, q: &Tensor, k: &Tensor| {
        assert!((call.softmax_scale - 1.0 / (q.dim(3)? as f32).sqrt()).abs() < 1e-7);
        noted.lock().unwrap().push((call.layer, q.dim(1)?, k.dim(1)?, call.prompt_len));
        Ok(())
    });
    let take = || std::mem::take(&mut *noted.lock().unwrap());
    let mut reports = Vec::new();
    let mut report = |done, total| reports.push((done, total));
    let options = PrefillOptions::new().chunk(8).on_progress(&mut report);
    decoder.prefill(&tokens(1, 20, 288), &mut cache, &noting, options).unwrap();
    let calls = |chunks: &[(usize, usize)], prompt_len| -> Vec<_> {
        chunks.iter().flat_map(|&(q_len, k_len)| (0..2).map(move |layer| (layer, q_len, k_len, prompt_len))).collect()
    };
    assert_eq!(take(), calls(&[(8, 8), (8, 16), (4, 20)], 20));
    assert_eq!(reports, [(8, 20), (16, 20), (20, 20)]);
    // After a cached prefix, the prompt is longer than the input.
    decoder.prefill(&tokens(1, 9, 288), &mut cache, &noting, PrefillOptions::new().chunk(8)).unwrap();
    assert_eq!(take(), calls(&[(8, 28), (1, 29)], 29));
    decoder.decode(&tokens(1, 1, 288), &mut cache).unwrap();
    assert_eq!(take(), [], "decoding must not use the seam");
}

#[test]
fn a_failed_prefill_leaves_the_cache_as_it_was() {
    let decoder = decoder(&llama_json(), 6);
    let mut cache = decoder.new_cache(1, 64).unwrap();
    decoder.prefill(&tokens(1, 4, 288), &mut cache, &Dense, PrefillOptions::new()).unwrap();
    let failing = Watched(|_: &PrefillCall, _: &Tensor, k: &Tensor| match k.dim(1)? {
        0..=10 => Ok(()),
        _ => candle_core::bail!("no more"),
    });
    assert!(decoder.prefill(&tokens(1, 20, 288), &mut cache, &failing, PrefillOptions::new().chunk(5)).is_err());
    assert_eq!(cache.len(), 4);
}

#[test]
fn half_precision_stays_close() {
    for dtype in [DType::BF16, DType::F16] {
        let json = llama_json();
        let vb = VarBuilder::from_tensors(weights(&json, 8), dtype, &Device::Cpu);
        let half = Decoder::load(&config(&json), &vb, None).unwrap();
        assert_eq!(half.dtype(), dtype);
        let run = |decoder: &Decoder| {
            let mut cache = decoder.new_cache(1, 40).unwrap();
            let out = decoder.prefill(&tokens(1, 33, 288), &mut cache, &Dense, PrefillOptions::new()).unwrap();
            assert_eq!(out.logits.dtype(), DType::F32);
            decoder.decode(&tokens(1, 1, 288), &mut cache).unwrap()
        };
        let (half, full) = (run(&half), run(&decoder(&json, 8)));
        assert!(max_diff(&half, &full) < 0.05 * max_abs(&full), "{dtype:?}");
    }
}

#[test]
fn the_stream_is_greedy_decoding_and_stops() {
    let decoder = decoder(&llama_json(), 9);
    let prompt = tokens(1, 12, 288);
    let ids: Vec<u32> = prompt.flatten_all().unwrap().to_vec1().unwrap();
    let mut cache = decoder.new_cache(1, 64).unwrap();
    let mut run = |eos: &[u32], options: &GenerationOptions| {
        cache.reset();
        let out = decoder.prefill(&prompt, &mut cache, &Dense, PrefillOptions::new()).unwrap();
        let logits = out.last_logits().unwrap();
        let mut stream = TokenStream::new(&decoder, &mut cache, &logits, &ids, eos, options).unwrap();
        let tokens: Vec<u32> = stream.by_ref().map(|token| token.unwrap()).collect();
        (tokens, stream.stop_reason(), cache.len())
    };
    let options = GenerationOptions { max_new_tokens: 6, ..Default::default() };
    let (greedy, stop, cached) = run(&[], &options);
    assert_eq!((greedy.len(), stop), (6, Some(StopReason::Length)));
    assert_eq!(cached, 12 + 5, "the last token needs no forward pass");

    // By hand: prefill the growing text, take the most likely token.
    let mut all = ids.clone();
    for token in &greedy {
        let tokens = Tensor::from_slice(&all, (1, all.len()), &Device::Cpu).unwrap();
        let likeliest: Vec<u32> = last_logits(&decoder, &tokens).argmax(1).unwrap().to_vec1().unwrap();
        assert_eq!(likeliest, [*token]);
        all.push(*token);
    }
    let stop_at = greedy.iter().position(|token| *token == greedy[3]).unwrap();
    let (until_eos, stop, _) = run(&[greedy[3]], &options);
    assert_eq!((&until_eos[..], stop), (&greedy[..stop_at], Some(StopReason::Eos)));

    let sampled = GenerationOptions { temperature: Some(1.5), top_k: Some(50), top_p: Some(0.9), ..options.clone() };
    assert_eq!(run(&[], &sampled), run(&[], &sampled), "the seed decides");
    let penalised = GenerationOptions { repeat_penalty: 1e6, repeat_last_n: 64, ..options };
    let (fresh, ..) = run(&[], &penalised);
    let mut seen = ids.clone();
    for token in fresh {
        assert!(!seen.contains(&token), "a penalised token came again");
        seen.push(token);
    }
}
