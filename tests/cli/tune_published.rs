//! `evaluate tune-spargeattn` and `search-minference`, and what they write as an option of the methods.

use s2o_baselines::{MInferenceConfig, SpargeConfig};
use serde_json::Value;
use tempfile::TempDir;

use crate::{error_of, stdout_of, text};

const TOKENS: &str = "1536";

/// All heads of all layers by one method, on the prompt that the tuners build.
fn compared(method: &str) -> Vec<Value> {
    let args = ["--context", TOKENS, "--layers", "0,1,2,3,4,5", "--json", "--methods", method];
    let stdout = stdout_of("compare", &args);
    stdout.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

fn of_heads(rows: &[Value]) -> impl Iterator<Item = &Value> {
    rows.iter().filter(|row| row["head"].as_i64() >= Some(0))
}

#[test]
fn tuned_spargeattn_keeps_its_bounds() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("spargeattn.json");
    let args = ["tune-spargeattn", "--l1", "0.2", "--l2", "0.25", "--lengths", TOKENS, "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    for part in ["needle-7m", "layer", "density", "mean density 0.", "spargeattn.json"] {
        assert!(table.contains(part), "{part} in {table}");
    }
    assert_eq!(SpargeConfig::load(&file).expect("settings").layers.len(), 6);

    let tuned = compared(&format!("spargeattn:config={}", text(&file)));
    assert_eq!(of_heads(&tuned).count(), 24);
    for row in of_heads(&tuned) {
        assert!(row["rel_l1"].as_f64() <= Some(0.25), "{row}");
    }
    assert!(of_heads(&tuned).any(|row| row["density"].as_f64() < Some(0.9)), "nothing is skipped");

    let both = format!("spargeattn:config={}:tau=0.9", text(&file));
    let error = error_of("compare", &["--context", TOKENS, "--methods", &both]);
    assert!(error.contains("tau") && error.contains("config"), "{error}");
}

#[test]
fn a_saved_search_selects_as_the_search_on_the_prompt_does() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("minference.json");
    let args = ["search-minference", "--budget", "0.02", "--lengths", TOKENS, "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    assert!(table.contains("mean density 0.") && table.contains("minference.json"), "{table}");
    let config = MInferenceConfig::load(&file).expect("patterns");
    assert!(config.layers.values().all(|heads| heads.len() == 4) && config.layers.len() == 6);

    let densities =
        |method: &str| -> Vec<Value> { of_heads(&compared(method)).map(|row| row["density"].clone()).collect() };
    let saved = densities(&format!("minference:config={}", text(&file)));
    assert_eq!(saved, densities("minference:budget=0.02"));
    assert!(saved.iter().any(|density| density.as_f64() < Some(0.9)), "nothing is skipped");

    let missing = directory.path().join("nothing.json");
    let error = error_of("compare", &["--methods", &format!("minference:config={}", text(&missing))]);
    assert!(error.contains("nothing.json"), "{error}");
    let error = error_of("evaluate", &["search-minference", "--budget", "0", "--save", text(&file)]);
    assert!(error.contains("--budget: expected a number above 0, got 0"), "{error}");
}
