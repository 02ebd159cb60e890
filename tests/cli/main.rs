//! The example binaries through their command lines, as a user runs them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

mod compare;
mod evaluate;
mod experiment;
mod heatmap;
mod models;
mod prefill;
mod synthetic;
mod tune;
mod tune_published;

/// Cargo builds the examples before the tests, but tells tests only the paths of ordinary binaries.
pub(crate) fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("the test has a path");
    let target = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let path = target.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is not built: run `cargo build --release --examples`", path.display());
    let mut command = Command::new(path);
    // A backtrace must not spoil the one line of an error, even when it is asked for.
    command.env("RUST_BACKTRACE", "1").env("HF_HUB_OFFLINE", "1");
    command
}

pub(crate) fn run(name: &str, args: &[&str]) -> Output {
    example(name).args(args).output().expect("the example starts")
}

pub(crate) fn stdout_of(name: &str, args: &[&str]) -> String {
    let output = run(name, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {args:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The single line on stderr of a run that fails with exit code 1.
pub(crate) fn error_of(name: &str, args: &[&str]) -> String {
    let output = run(name, args);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{name} {args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{name} {args:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{stderr}");
    stderr
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

#[test]
fn wrong_usage_exits_with_2() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("file");
    fs::write(&file, "").expect("written");
    let cases: &[(&str, &[&str], &str)] = &[
        ("prefill", &["--no-such-flag"], "--no-such-flag"),
        ("prefill", &["--attention", "sparse"], "s2o, dense"),
        ("prefill", &["--device", "cuda:one"], "expected cpu, cuda or cuda:N, got cuda:one"),
        ("compare", &["--device", "cuda", "--cpu"], "cannot be used with"),
        ("prefill", &["--attention", "dense", "--tau", "0.1"], "no effect"),
        ("prefill", &["--prompt", "a", "--passkey"], "cannot be used with"),
        ("prefill", &["--prompt", "a", "--depth", "0.1"], "cannot be used with"),
        ("prefill", &["--segment", "long"], "`auto` or a number"),
        ("prefill", &["--score", "third-cumulant"], "second-cumulant"),
        ("prefill", &["--top-p", "0.9"], "--temperature"),
        ("prefill", &["--threads", "0"], "--threads"),
        ("compare", &["--methods", "magic"], "dense, s2o"),
        ("compare", &["--methods", "dense", "--tau", "0.1"], "no effect"),
        ("compare", &["--tensors", text(&file), "--prompt", "a"], "cannot be used with"),
        ("compare", &["--tensors", text(&file), "--save-tensors", "b"], "cannot be used with"),
        ("compare", &["--layers-file", text(&file), "--tau", "0.1"], "cannot be used with"),
        ("compare", &["--repeat", "0"], "--repeat"),
        ("heatmap", &["--cells", "0"], "--cells"),
        ("heatmap", &["--pool", "median"], "max, mean"),
    ];
    for (name, args, part) in cases {
        let output = run(name, args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name} {args:?}: {stderr}");
        assert!(stderr.contains(part), "{name} {args:?}: {stderr}");
    }
}
