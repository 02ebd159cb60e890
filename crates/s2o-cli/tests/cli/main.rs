//! The program through its command line, as a user runs it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

mod compare;
mod evaluate;
mod experiment;
mod heatmap;
mod models;
mod prefill;
mod ranks;
mod report;
mod synthetic;
mod tune;
mod tune_published;

/// The layers of the embedded model.
pub(crate) const ALL_LAYERS: &str = "0,1,2,3,4,5,6,7,8,9";

/// `s2o <name>`.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_s2o"));
    // A backtrace must not add lines to an error, even if it is requested.
    command.arg(name).env("RUST_BACKTRACE", "1").env("HF_HUB_OFFLINE", "1");
    command
}

pub(crate) fn run(name: &str, args: &[&str]) -> Output {
    command(name).args(args).output().expect("the program starts")
}

pub(crate) fn stdout_of(name: &str, args: &[&str]) -> String {
    let output = run(name, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {args:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The only line on stderr of a run without progress that fails with exit code 1.
pub(crate) fn error_of(name: &str, args: &[&str]) -> String {
    let output = run(name, &[&["--quiet"], args].concat());
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{name} {args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{name} {args:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{stderr}");
    stderr
}

/// The JSON objects that a run prints, one a line.
pub(crate) fn rows_of(name: &str, args: &[&str]) -> Vec<Value> {
    stdout_of(name, args).lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

/// The number of a key.
pub(crate) fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"))
}

pub(crate) fn assert_has(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part} in {text}"));
}

/// Each of the cases fails with an error that contains its part.
pub(crate) fn assert_refused(name: &str, before: &[&str], cases: &[(&[&str], &str)]) {
    for (args, part) in cases {
        let error = error_of(name, &[before, *args].concat());
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

/// Each of the cases is a usage error.
pub(crate) fn assert_misused(name: &str, cases: &[&[&str]]) {
    cases.iter().for_each(|args| assert_eq!(run(name, args).status.code(), Some(2), "{args:?}"));
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

#[test]
fn help_and_version_name_the_program() {
    assert_eq!(stdout_of("--version", &[]), concat!("s2o ", env!("CARGO_PKG_VERSION"), "\n"));
    let help = stdout_of("--help", &[]);
    assert_has(&help, &["prefill", "compare", "evaluate", "heatmap", "statistics", "--quiet", "Examples:"]);
    // Without a command the short help goes to stderr.
    let output = Command::new(env!("CARGO_BIN_EXE_s2o")).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("prefill"));
}

#[test]
fn a_number_that_is_none_is_refused_with_what_is_expected() {
    let from_one = "expected a whole number from 1 on";
    let cases: &[(&str, &[&str], &str)] = &[
        ("prefill", &["--threads", "0"], "invalid value '0' for '--threads <N>': expected a whole number from 1 on"),
        ("compare", &["--repeat", "0"], from_one),
        ("heatmap", &["--cells", "0"], from_one),
        ("evaluate", &["run", "--items", "0"], from_one),
        (
            "prefill",
            &["--context", "-5"],
            "invalid value '-5' for '--context <TOKENS>': expected a whole number from 0 on",
        ),
        (
            "compare",
            &["--layers", "0,a"],
            "invalid value 'a' for '--layers <LAYERS>': expected a whole number from 0 on",
        ),
        ("prefill", &["--seed", "99999999999999999999"], "expected a smaller whole number"),
        ("evaluate", &["run", "--depths", "half"], "invalid value 'half' for '--depths <SHARES>': expected a number\n"),
    ];
    for (command, args, part) in cases {
        let output = run(command, args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert_has(&error, &[part, "try '--help'"]);
    }
}

#[test]
fn the_help_shows_lists_as_they_are_typed() {
    assert_has(&stdout_of("compare", &["--help"]), &["[default: dense,s2o]"]);
    assert_has(&stdout_of("evaluate", &["tune", "--help"]), &["0.0005,0.001,0.002,"]);
}

#[test]
fn headings_of_compares_help_hold_their_own_flags() {
    let help = stdout_of("compare", &["--help"]);
    // Headings are not indented and end with a colon.
    let section = |flag: &str| {
        let line =
            help.lines().position(|line| line.trim_start().starts_with(flag)).unwrap_or_else(|| panic!("{flag}"));
        let above: Vec<&str> = help.lines().take(line).collect();
        let is_heading = |line: &&&str| line.ends_with(':') && !line.starts_with(' ');
        above.iter().rev().find(is_heading).map(|heading| heading.trim_end_matches(':'))
    };
    for (heading, flags) in [
        (
            "Options",
            &["--against", "--methods", "--repeat", "--csv", "--json", "--tensors", "--layers <", "-q, --quiet"][..],
        ),
        ("Model", &["--model", "--dtype", "--chunk"]),
        ("Prompt", &["--prompt <", "--context", "--seed"]),
        ("S2O", &["--preset", "--tau", "--skip-layers"]),
    ] {
        flags.iter().for_each(|flag| assert_eq!(section(flag), Some(heading), "{flag} in {help}"));
    }
    // Without the line breaks.
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_has(&words, &["for the paper's settings [default: default]"]);
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
        ("prefill", &["--attention", "dense", "--dense-below", "0"], "attention; leave out '--attention dense'"),
        (
            "prefill",
            &["--use-flash-attn", "--tau", "0.1", "--preset", "paper"],
            "--preset, --tau: no effect on exact attention; leave out '--use-flash-attn'",
        ),
        ("prefill", &["--use-flash-attn", "--attention", "s2o"], "cannot be used with"),
        ("prefill", &["--prompt", "a", "--passkey"], "cannot be used with"),
        ("prefill", &["--prompt", "a", "--depth", "0.1"], "cannot be used with"),
        ("prefill", &["--segment", "long"], "`auto` or a number"),
        ("prefill", &["--score", "third-cumulant"], "second-cumulant"),
        ("prefill", &["--top-p", "0.9"], "--temperature"),
        ("prefill", &["--threads", "0"], "--threads"),
        ("prefill", &["--chunk", "0"], "'--chunk <TOKENS>': expected auto, whole or a number of tokens from 1 on"),
        ("prefill", &["--context", "-5"], "invalid value '-5' for '--context <TOKENS>'"),
        ("prefill", &["-n", "-1"], "invalid value '-1' for '--sample-len <TOKENS>'"),
        ("compare", &["--repeat", "-1"], "invalid value '-1' for '--repeat <N>'"),
        ("evaluate", &["run", "--items", "-1"], "invalid value '-1' for '--items <N>'"),
        ("evaluate", &["tune", "--max-rel-l1", "1", "--lengths", "-5"], "invalid value '-5' for '--lengths <TOKENS>'"),
        ("compare", &["--methods", "magic"], "dense, s2o"),
        ("compare", &["--methods", "dense", "--tau", "0.1"], "--tau: no effect without 's2o'"),
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
