//! The process-wide policy. One test at a time may set it.

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Result, Tensor};
use candle_s2o::S2oOp;
use s2o_flash_attn::s2o::{self, LayerSetting, LayerSettings, Policy, S2oConfig, SegmentLen, TunedOn};
use s2o_flash_attn::{
    flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen, flash_attn_varlen_alibi,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_windowed,
};
use s2o_testkit::{max_difference, tensor};

/// Nearly uniform attention, so early stopping stops early.
const SCALE: f32 = 0.02;
const LEN: usize = 1024;

/// Locks the policy for one test, and restores the default afterwards.
struct Held(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'static, ()>);

fn hold() -> Held {
    static ONE: Mutex<()> = Mutex::new(());
    Held(ONE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Drop for Held {
    fn drop(&mut self) {
        s2o::set_policy(Policy::default());
        s2o::collect_stats(false);
    }
}

fn inputs() -> [Tensor; 3] {
    [
        tensor(&[1, LEN, 2, 64], 1, DType::F32),
        tensor(&[1, LEN, 1, 64], 2, DType::F32),
        tensor(&[1, LEN, 1, 64], 3, DType::F32),
    ]
}

/// Sparse from 1000 tokens, with a large tau.
fn eager() -> S2oConfig {
    S2oConfig::builder().tau(0.5).segment_len(SegmentLen::Fixed(128)).dense_below(1000).build().unwrap()
}

#[test]
fn long_causal_calls_are_sparse_and_others_dense() -> Result<()> {
    let _held = hold();
    let [q, k, v] = inputs();
    s2o::set_policy(Policy::Dense);
    let dense = flash_attn(&q, &k, &v, SCALE, true)?;
    let full = flash_attn(&q, &k, &v, SCALE, false)?;

    s2o::set_policy(Policy::S2o(eager()));
    let sparse = flash_attn(&q, &k, &v, SCALE, true)?;
    assert!(max_difference(&sparse, &dense) > 1e-3);
    assert_eq!(max_difference(&sparse, &candle_s2o::s2o_attn(&q, &k, &v, SCALE, &eager())?), 0.0);
    assert_eq!(max_difference(&flash_attn_windowed(&q, &k, &v, SCALE, None, Some(0))?, &sparse), 0.0);
    assert_eq!(max_difference(&flash_attn(&q, &k, &v, SCALE, false)?, &full), 0.0);

    let short = |t: &Tensor| t.narrow(1, 0, 900);
    let out = flash_attn(&short(&q)?, &short(&k)?, &short(&v)?, SCALE, true)?;
    assert!(max_difference(&out, &short(&dense)?) < 1e-5);
    Ok(())
}

#[test]
fn long_sequences_of_one_call_are_sparse_and_short_ones_dense() -> Result<()> {
    let _held = hold();
    let tensors = inputs();
    let short = tensors.each_ref().map(|t| t.narrow(1, 0, 300).unwrap());
    s2o::set_policy(Policy::S2o(eager()));
    let whole = |[q, k, v]: &[Tensor; 3]| flash_attn(q, k, v, SCALE, true)?.squeeze(0);
    let expected = Tensor::cat(&[whole(&tensors)?, whole(&short)?], 0)?;
    let [q, k, v] = [0, 1, 2].map(|i| Tensor::cat(&[&tensors[i], &short[i]], 1).unwrap().squeeze(0).unwrap());
    let ends = Tensor::new(&[0u32, LEN as u32, LEN as u32 + 300], q.device())?;
    s2o::collect_stats(true);
    let out = flash_attn_varlen(&q, &k, &v, &ends, &ends, LEN, LEN, SCALE, true)?;
    assert_eq!(max_difference(&out, &expected), 0.0);
    let densities: Vec<f64> = s2o::take_stats().unwrap().iter().map(|call| call.stats.density()).collect();
    assert!(matches!(densities[..], [long, short] if long < 0.95 && short == 1.0), "{densities:?}");
    // Not causal, or none long enough.
    flash_attn_varlen(&q, &k, &v, &ends, &ends, LEN, LEN, SCALE, false)?;
    let [q, k, v] = short.map(|t| t.squeeze(0).unwrap());
    let ends = Tensor::new(&[0u32, 300], q.device())?;
    flash_attn_varlen(&q, &k, &v, &ends, &ends, 300, 300, SCALE, true)?;
    assert!(s2o::take_stats().unwrap().is_empty());
    Ok(())
}

#[test]
fn statistics_are_collected_on_demand() -> Result<()> {
    let _held = hold();
    let [q, k, v] = inputs();
    s2o::set_policy(Policy::S2o(eager()));
    flash_attn(&q, &k, &v, SCALE, true)?;
    assert!(s2o::take_stats().unwrap().is_empty());

    s2o::collect_stats(true);
    flash_attn(&q, &k, &v, SCALE, true)?;
    flash_attn(&q.narrow(1, LEN - 200, 200)?, &k, &v, SCALE, true)?;
    flash_attn(&q, &k, &v, SCALE, false)?;
    let calls = s2o::take_stats().unwrap();
    assert_eq!(calls.iter().map(|call| (call.q_len, call.k_len)).collect::<Vec<_>>(), [(LEN, LEN), (200, LEN)]);
    assert_eq!(calls[0].stats.heads.len(), 2);
    assert!(calls[0].stats.density() < 0.95, "{}", calls[0].stats.density());
    assert!(s2o::take_stats().unwrap().is_empty());
    Ok(())
}

/// Settings of a model with two layers, a large tau for the second.
fn two_layers() -> LayerSettings {
    LayerSettings::new(TunedOn::default(), vec![LayerSetting::Dense, LayerSetting::Tau(0.5)]).unwrap()
}

#[test]
fn layers_have_thresholds_of_their_own() -> Result<()> {
    let _held = hold();
    let [q, k, v] = inputs();
    s2o::set_policy(Policy::Dense);
    let dense = flash_attn(&q, &k, &v, SCALE, true)?;
    let sparse = candle_s2o::s2o_attn(&q, &k, &v, SCALE, &eager())?;
    let base = eager().to_builder().tau(0.0).build().unwrap();
    s2o::set_policy(Policy::Layers { base, settings: Arc::new(two_layers()) });
    let one = |t: &Tensor| t.narrow(1, LEN - 1, 1);
    // Two prompts with a new token after each, and calls in between that belong to no layer.
    for _ in 0..2 {
        assert_eq!(max_difference(&flash_attn(&q, &k, &v, SCALE, true)?, &dense), 0.0);
        flash_attn(&q, &k, &v, SCALE, false)?;
        assert_eq!(max_difference(&flash_attn(&q, &k, &v, SCALE, true)?, &sparse), 0.0);
        assert!(max_difference(&flash_attn(&one(&q)?, &k, &v, SCALE, true)?, &one(&dense)?) < 1e-5);
        flash_attn(&one(&q)?, &k, &v, SCALE, false)?;
    }
    // A new token when the second layer is due is an error: the model has one layer, or three.
    flash_attn(&q, &k, &v, SCALE, true)?;
    let error = flash_attn(&one(&q)?, &k, &v, SCALE, true).unwrap_err().to_string();
    assert!(error.contains("layer 1 of the 2 in the settings"), "{error}");
    // So is a prompt of another length, unless the caller declares that the prefill was interrupted.
    let short = |t: &Tensor| t.narrow(1, 0, 200);
    flash_attn(&q, &k, &v, SCALE, true)?;
    let error = flash_attn(&short(&q)?, &short(&k)?, &short(&v)?, SCALE, true).unwrap_err().to_string();
    assert!(error.contains("200 queries of 200 keys"), "{error}");
    flash_attn(&q, &k, &v, SCALE, true)?;
    s2o::begin_prompt();
    flash_attn(&short(&q)?, &short(&k)?, &short(&v)?, SCALE, true)?;
    // A new policy restarts the count.
    s2o::set_policy(Policy::Layers { base: eager(), settings: Arc::new(two_layers()) });
    assert_eq!(max_difference(&flash_attn(&q, &k, &v, SCALE, true)?, &dense), 0.0);
    Ok(())
}

#[test]
fn softcapped_calls_follow_the_policy() -> Result<()> {
    const CAP: f32 = 1.5;
    let _held = hold();
    let [q, k, v] = inputs();
    let call = |scale| flash_attn_alibi_windowed_softcap(&q, &k, &v, None, scale, None, Some(0), CAP);
    s2o::set_policy(Policy::Dense);
    // Large scores, which the cap changes.
    let (exact, uncapped) = (call(0.5)?, flash_attn(&q, &k, &v, 0.5, true)?);
    assert!(max_difference(&exact, &uncapped) > 0.1);
    let config = eager().to_builder().tau(0.9).build().unwrap();
    s2o::set_policy(Policy::S2o(config.clone()));
    s2o::collect_stats(true);
    let sparse = call(0.5)?;
    let stats = s2o::take_stats()?;
    assert!(stats.len() == 1 && stats[0].stats.density() < 1.0, "{stats:?}");
    assert!(max_difference(&sparse, &exact) > 1e-4);
    let op = S2oOp::new(0.5, config).with_softcap(CAP).apply(&q, &k, &v)?;
    assert_eq!(max_difference(&sparse, &op), 0.0);

    // Sequences too.
    let [q, k, v] = [&q, &k, &v].map(|t| t.squeeze(0).unwrap());
    let ends = Tensor::new(&[0u32, LEN as u32], q.device())?;
    let of_sequence =
        flash_attn_varlen_alibi_windowed_softcap(&q, &k, &v, None, &ends, &ends, LEN, LEN, 0.5, None, Some(0), CAP)?;
    assert_eq!(max_difference(&of_sequence.unsqueeze(0)?, &op), 0.0);
    Ok(())
}

#[test]
fn layers_of_one_sequence_are_counted_and_several_sequences_are_dense() -> Result<()> {
    let _held = hold();
    let [q, k, v] = inputs().map(|t| t.squeeze(0).unwrap());
    let ends = |ends: &[u32]| Tensor::new(ends, q.device()).unwrap();
    let (len, half) = (LEN as u32, LEN as u32 / 2);
    let call = |ends: &Tensor| flash_attn_varlen(&q, &k, &v, ends, ends, LEN, LEN, SCALE, true);
    s2o::set_policy(Policy::Dense);
    let (one, two) = (ends(&[0, len]), ends(&[0, half, len]));
    let (dense_of_one, dense_of_two) = (call(&one)?, call(&two)?);
    s2o::set_policy(Policy::S2o(eager()));
    let sparse = call(&one)?;
    let base = eager().to_builder().tau(0.0).build().unwrap();
    s2o::set_policy(Policy::Layers { base, settings: Arc::new(two_layers()) });
    assert_eq!(max_difference(&call(&one)?, &dense_of_one), 0.0);
    // Two sequences between two layers belong to none.
    assert_eq!(max_difference(&call(&two)?, &dense_of_two), 0.0);
    assert_eq!(max_difference(&call(&one)?, &sparse), 0.0);
    assert!(max_difference(&sparse, &dense_of_one) > 1e-3);
    Ok(())
}

/// Run by the tests below in a separate process, because the environment is read once.
#[test]
#[ignore = "the environment of this process is not prepared"]
fn child() -> Result<()> {
    let [q, k, v] = inputs();
    s2o::collect_stats(true);
    for _ in 0..2 {
        match flash_attn(&q, &k, &v, SCALE, true) {
            Ok(_) => println!("<{:?} {}>", s2o::policy(), s2o::take_stats().unwrap().len()),
            Err(error) => println!("<{error}>"),
        }
    }
    // Calls that no policy makes sparse need none.
    flash_attn(&q, &k, &v, SCALE, false)?;
    let [few_q, few_k, few_v] = [&q, &k, &v].map(|t| t.squeeze(0).and_then(|t| t.narrow(0, 0, 9)).unwrap());
    let (ends, slopes) = (Tensor::new(&[0u32, 9], q.device())?, Tensor::new(&[0.5f32, 0.25], q.device())?);
    flash_attn_varlen_alibi(&few_q, &few_k, &few_v, &slopes, &ends, &ends, 9, 9, SCALE, true)?;
    let (causal, cap) = (Some(0), 0.5);
    flash_attn_varlen_alibi_windowed_softcap(
        &few_q,
        &few_k,
        &few_v,
        None,
        &ends,
        &ends,
        9,
        9,
        SCALE,
        Some(3),
        causal,
        cap,
    )?;
    s2o::set_policy(Policy::default());
    flash_attn(&q, &k, &v, SCALE, true)?;
    Ok(())
}

/// Runs `child` with these variables: both of its calls print a line with `words`.
#[track_caller]
fn in_child(variables: &[(&str, &str)], words: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]);
    // Candle's errors print the backtrace after the message.
    command.env("RUST_BACKTRACE", "0");
    std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("S2O_")).for_each(|(name, _)| {
        command.env_remove(name);
    });
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.contains('<')).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains(words)), "expected {words}, got {lines:?}");
}

#[test]
fn the_environment_is_the_first_policy() {
    let expected = format!("<{:?} 1>", Ok::<_, s2o::PolicyError>(Policy::S2o(eager())));
    in_child(&[("S2O_TAU", "0.5"), ("S2O_SEGMENT", "128"), ("S2O_DENSE_BELOW", "1000")], &expected);
    in_child(&[("S2O_OFF", "1")], "<Ok(Dense) 0>");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layers.json");
    two_layers().save(&path).unwrap();
    in_child(&[("S2O_LAYERS", path.to_str().unwrap()), ("S2O_DENSE_BELOW", "1000")], "<Ok(Layers {");
}

#[test]
fn a_bad_environment_is_an_error_of_every_causal_call_until_a_policy_is_set() {
    let words = "<environment variable S2O_TAU: tau: expected a number in [0, 1), got 2>";
    in_child(&[("S2O_TAU", "2")], words);
    let words = "<environment variable S2O_LAYERS: no-such-file: ";
    in_child(&[("S2O_LAYERS", "no-such-file")], words);
}
