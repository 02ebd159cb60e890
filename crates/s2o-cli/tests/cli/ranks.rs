//! `prefill` on several ranks: processes on the CPU, one a GPU elsewhere.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use s2o_testkit::ranks::free_address;
use serde_json::Value;

use crate::{assert_has, assert_refused, command, error_of, number, run, stdout_of};

/// From the end of a rank until all have ended.
const SOON: Duration = Duration::from_secs(8);

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of("prefill", args)).expect("one JSON object")
}

#[test]
fn two_ranks_answer_as_one() {
    let arguments = ["--cpu", "--context", "2600", "--json", "--threads", "1"];
    let one = json_of(&arguments);
    for mode in ["sequence", "tensor"] {
        let two = json_of(&[&arguments, &["--gpus", "2", "--parallel", mode][..]].concat());
        for same in ["answer_dense", "answer_s2o", "expected", "tokens"] {
            assert_eq!(one[same], two[same], "{mode}");
        }
        // The statistics are those of all heads.
        assert!((number(&one, "density") - number(&two, "density")).abs() < 1e-3, "{mode}: {one} {two}");
        assert!((number(&one, "rel_l1") - number(&two, "rel_l1")).abs() < 1e-4, "{mode}: {one} {two}");
    }
}

#[test]
fn the_report_names_the_ranks() {
    let text = stdout_of("prefill", &["--cpu", "--gpus", "2", "--context", "2304", "--threads", "1"]);
    assert_has(&text, &["\nranks   2, sequence parallel; the busiest computes 1.", "\nS2O answers   "]);
}

#[test]
fn the_work_of_each_head_is_measured_once_and_then_read() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tiles.json");
    let path = file.to_str().unwrap();
    let arguments = ["--cpu", "--context", "2304", "--threads", "1", "--json", "--gpus", "2", "--head-tiles", path];
    let measuring = json_of(&arguments);
    let written = std::fs::read_to_string(&file).unwrap();
    let tiles: Value = serde_json::from_str(&written).unwrap();
    let of_head = |layer: usize, head: usize| tiles["by_layer"][layer][head].as_f64().unwrap();
    assert!(of_head(0, 0) > 1.0 && of_head(0, 1) > 1.0, "{tiles}");

    let reading = json_of(&arguments);
    for same in ["answer_s2o", "density"] {
        assert_eq!(measuring[same], reading[same]);
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), written, "a file is kept");

    std::fs::write(&file, "[]").unwrap();
    let two = ["--cpu", "--gpus", "2", "--head-tiles", path];
    assert_has(&error_of("prefill", &two), &["--head-tiles", "tiles.json: expected a file that a run with this flag"]);
    assert_has(&error_of("prefill", &["--cpu", "--head-tiles", "/nowhere/x"]), &["cannot write /nowhere/x"]);
    std::fs::write(&file, written).unwrap();
    assert_has(&error_of("prefill", &["--cpu", "--head-tiles", path]), &["--head-tiles: expected several GPUs"]);
    let one = ["--cpu", "--parallel", "tensor"];
    assert_has(&error_of("prefill", &one), &["--parallel tensor: expected several GPUs (--gpus N), got one"]);
    let dense = run("prefill", &[&two[..], &["--attention", "dense"]].concat());
    assert_eq!(dense.status.code(), Some(2));
    assert_has(&String::from_utf8_lossy(&dense.stderr), &["--head-tiles: no effect on exact attention"]);
}

fn rank(number: usize, of: usize, address: &str, more: &[&str]) -> Command {
    let mut command = command("prefill");
    command.args(["--cpu", "--context", "600", "--threads", "1", "--quiet"]).args(more);
    command.args(["--rank", &number.to_string(), "--world-size", &of.to_string(), "--rendezvous", address]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Ranks that are started one by one, as on several hosts.
fn by_hand(options: [&[&str]; 2]) -> [Output; 2] {
    let address = free_address();
    let start = |number: usize| rank(number, 2, &address, options[number]).spawn().unwrap();
    let ranks = [start(0), start(1)];
    ranks.map(|rank| rank.wait_with_output().unwrap())
}

#[test]
fn ranks_can_be_started_one_by_one() {
    let [first, second] = by_hand([&[], &[]]);
    assert!(first.status.success() && second.status.success());
    assert_has(&String::from_utf8(first.stdout).unwrap(), &["ranks   2, sequence parallel", "S2O answers"]);
    assert!(second.stdout.is_empty(), "only the first rank prints");
}

#[test]
fn ranks_that_differ_fail_together() {
    for (options, expected) in [
        ([&["--tau", "0.1"][..], &["--tau", "0.2"]], "the options: expected"),
        ([&["--dtype", "bf16"], &["--dtype", "f32"]], "the model's configuration: expected"),
        ([&["--parallel", "tensor"], &["--parallel", "sequence"]], "what the ranks share: expected"),
    ] {
        for output in by_hand(options) {
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{stderr}");
            assert!(stderr.contains(expected), "{stderr}");
        }
    }
}

#[test]
fn a_port_in_use_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let output = rank(0, 2, &address, &[]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_has(&stderr, &[&address, "expected a free port"]);
}

#[test]
fn impossible_numbers_are_refused() {
    let error = error_of("prefill", &["--cpu", "--gpus", "3", "--context", "600"]);
    assert_has(&error, &["number of ranks: expected a divisor of the model's 2 KV heads, got 3"]);
    assert_refused(
        "prefill",
        &[],
        &[
            (&["--gpus", "0"], "--gpus: expected at least 1, got 0"),
            (&["--gpus", "2", "--device", "cuda:1"], "--gpus 2: expected no --device with it"),
            (&["--cpu", "--rank", "2", "--world-size", "2", "--rendezvous", "127.0.0.1:9"], "got 2"),
            (&["--cpu", "--gpus", "2", "--tau", "2"], "--tau"),
        ],
    );
}

/// A rank that is killed ends all, with its number in the only message.
fn killed(arguments: &[&str], phase: &str, victim: impl Fn(&Child) -> u32) -> String {
    let mut first = command("prefill")
        .args(["--cpu", "--gpus", "2", "--threads", "1"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(first.stderr.take().unwrap()).lines();
    let begun = stderr.by_ref().map(Result::unwrap).any(|line| line.starts_with(phase));
    assert!(begun, "{phase} did not begin");
    thread::sleep(Duration::from_millis(300));
    let killed = Command::new("kill").args(["-9", &victim(&first).to_string()]).status().unwrap();
    assert!(killed.success());
    let since = Instant::now();
    let rest: Vec<String> = stderr.map(Result::unwrap).filter(|line| line.starts_with("error: ")).collect();
    let status = first.wait().unwrap();
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
    assert!(!status.success());
    rest.join("\n")
}

/// The process that `parent` started.
fn child_of(parent: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    children.split_whitespace().next().map(|child| child.parse().unwrap())
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_rank_ends_all_in_prefill() {
    let victim = |first: &Child| child_of(first.id()).expect("a second rank");
    let error = killed(&["--attention", "dense", "--context", "16384"], "prefill", victim);
    assert_eq!(error, "error: rank 1 of 2: it ended without a message (signal: 9 (SIGKILL))");
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_rank_ends_all_in_decoding() {
    let victim = |first: &Child| child_of(first.id()).expect("a second rank");
    // Tokens without meaning, and no end: an hour of decoding.
    let config = "{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 512, \"hidden_size\": 64, \
                   \"intermediate_size\": 128, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \
                   \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-5, \"max_position_embeddings\": 4000000}";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    std::fs::write(&path, config).unwrap();
    let model = ["--synthetic", crate::text(&path), "--synthetic-weights", "random"];
    let prompt = ["--tokens", "40", "-n", "1000000", "--chunk", "64"];
    let error = killed(&[&model[..], &prompt[..]].concat(), "prefill", victim);
    assert_eq!(error, "error: rank 1 of 2: it ended without a message (signal: 9 (SIGKILL))");
}

#[test]
#[cfg(target_os = "linux")]
fn no_rank_outlives_the_first() {
    let second = Cell::new(None);
    killed(&["--attention", "dense", "--context", "16384"], "prefill", |first| {
        second.set(child_of(first.id()));
        first.id()
    });
    let second = second.get().expect("a second rank");
    let since = Instant::now();
    while std::path::Path::new(&format!("/proc/{second}")).exists() {
        assert!(since.elapsed() < SOON, "rank 1 runs on");
        thread::sleep(Duration::from_millis(50));
    }
}
