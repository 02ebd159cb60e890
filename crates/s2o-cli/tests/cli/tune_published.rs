//! `evaluate tune-spargeattn` and `search-minference`, and their files as options of the methods.

use s2o_baselines::{MInferenceConfig, SpargeConfig};
use serde_json::Value;
use tempfile::TempDir;

use crate::{ALL_LAYERS, assert_has, assert_refused, error_of, rows_of, stdout_of, text};

/// All heads of all layers with one method, on the prompt that the tuners build.
fn compared(method: &str, tokens: &str) -> Vec<Value> {
    rows_of("compare", &["--context", tokens, "--layers", ALL_LAYERS, "--json", "--methods", method])
}

fn of_heads(rows: &[Value]) -> impl Iterator<Item = &Value> {
    rows.iter().filter(|row| row["head"].as_i64() >= Some(0))
}

#[test]
fn tuned_spargeattn_keeps_its_bounds() {
    // Short, because the tuner runs every layer 59 times.
    const TOKENS: &str = "512";
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("spargeattn.json");
    let args = ["tune-spargeattn", "--l1", "0.2", "--l2", "0.25", "--lengths", TOKENS, "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    assert_has(&table, &["needle-11m", "layer", "density", "mean density 0.", "spargeattn.json"]);
    assert_eq!(SpargeConfig::load(&file).expect("settings").layers.len(), 10);

    let method = format!("spargeattn:config={}", text(&file));
    let tuned = compared(&method, TOKENS);
    assert_eq!(of_heads(&tuned).count(), 40);
    for row in of_heads(&tuned) {
        assert!(row["rel_l1"].as_f64() <= Some(0.25), "{row}");
    }
    assert!(of_heads(&tuned).any(|row| row["density"].as_f64() < Some(0.9)), "nothing is skipped");
    let untuned = compared("spargeattn", TOKENS);
    let density = |rows: &[Value]| of_heads(rows).filter_map(|row| row["density"].as_f64()).sum::<f64>();
    assert!(density(&tuned) < density(&untuned), "{tuned:?} {untuned:?}");

    // A value that a file sets is not swept.
    let out = directory.path().join("rows");
    let args = ["experiment", "matched-density", "--context", TOKENS, "--layers", "4", "--methods", &method];
    stdout_of("evaluate", &[&args[..], &["--out", text(&out)]].concat());
    let sweep = std::fs::read_to_string(out.join("sweep.csv")).expect("rows");
    assert!(sweep.lines().count() == 2 && sweep.contains(&format!("{method},tau,,4,")), "{sweep}");

    let both = format!("spargeattn:config={}:tau=0.9", text(&file));
    assert_has(&error_of("compare", &["--context", TOKENS, "--methods", &both]), &["tau", "config"]);
}

#[test]
fn a_saved_search_selects_as_the_search_on_the_prompt_does() {
    const TOKENS: &str = "1536";
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("minference.json");
    let args = ["search-minference", "--budget", "0.02", "--lengths", TOKENS, "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    assert_has(&table, &["mean density 0.", "minference.json"]);
    let config = MInferenceConfig::load(&file).expect("patterns");
    assert!(config.layers.values().all(|heads| heads.len() == 4) && config.layers.len() == 10);

    let densities = |method: &str| -> Vec<Value> {
        of_heads(&compared(method, TOKENS)).map(|row| row["density"].clone()).collect()
    };
    let saved = densities(&format!("minference:config={}", text(&file)));
    assert_eq!(saved, densities("minference:budget=0.02"));
    assert!(saved.iter().any(|density| density.as_f64() < Some(0.9)), "nothing is skipped");
}

#[test]
fn what_cannot_be_tuned_or_read_is_refused() {
    let directory = TempDir::new().expect("a temporary directory");
    let save = directory.path().join("settings.json");
    let elsewhere = directory.path().join("no/settings.json");
    let cases: &[(&[&str], &str)] = &[
        (&["tune-spargeattn", "--l1", "0"], "l1: expected above 0, got 0"),
        (&["tune-spargeattn", "--l1", "0.1", "--pv-l1", "0.05"], "l2: expected at least l1, got 0.05"),
        (&["tune-spargeattn", "--prompt-file", "none"], "cannot read none"),
        (&["search-minference", "--budget", "0"], "--budget: expected a number above 0, got 0"),
        (&["search-minference", "--lengths", "600"], "expected more than 6400 tokens, up to which a pattern attends"),
    ];
    for (args, part) in cases {
        assert_refused("evaluate", args, &[(&["--save", text(&save)], part)]);
    }
    // The model does not exist either; that error would come later.
    let cases: &[(&[&str], &str)] = &[(
        &["--save", text(&elsewhere), "--model", "no-such-model"],
        "--save: expected a file in a directory that exists",
    )];
    for command in ["tune-spargeattn", "search-minference"] {
        assert_refused("evaluate", &[command], cases);
    }
    assert!(!save.exists(), "nothing is written");

    let file = directory.path().join("config.json");
    let pattern = r#"{"pattern":"block-sparse","blocks":1}"#;
    for (method, content, part) in [
        ("spargeattn", r#"{"layers":{},"l1":0.1}"#.to_owned(), "settings of SpargeAttn by layer and head, got unknown"),
        (
            "spargeattn",
            r#"{"layers":{"0":{"heads":[{"tau":1,"theta":0}],"lambda":null}}}"#.to_owned(),
            "layer 0: expected settings of 4 heads, got 1",
        ),
        (
            "spargeattn",
            r#"{"layers":{"0":{"heads":[{"tau":2,"theta":0}],"lambda":null}}}"#.to_owned(),
            "tau: expected above 0, up to 1, got 2",
        ),
        ("minference", "[]".to_owned(), "patterns of MInference by layer and head, got invalid"),
        (
            "minference",
            format!(r#"{{"layers":{{"0":[{pattern},{pattern}]}}}}"#),
            "layer 0: expected settings of 4 heads, got 2",
        ),
    ] {
        std::fs::write(&file, content).expect("written");
        let method = format!("{method}:config={}", text(&file));
        assert_refused("compare", &["--context", "300", "--layers", "0"], &[(&["--methods", &method], part)]);
    }
    let both = format!("minference:config={}:budget=1", text(&file));
    let part = "budget: expected none together with config, which sets it";
    assert_refused("compare", &[], &[(&["--methods", &both], part)]);
    let missing = directory.path().join("nothing.json");
    let error = error_of("compare", &["--methods", &format!("minference:config={}", text(&missing))]);
    assert_has(&error, &["cannot read", "nothing.json"]);
}
