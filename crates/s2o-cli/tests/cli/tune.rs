//! `evaluate tune`, and the settings that it writes in `prefill` and `compare`.

use candle_s2o::{LayerSetting, LayerSettings};
use serde_json::Value;
use tempfile::TempDir;

use crate::{error_of, run, stdout_of, text};

#[test]
fn tuned_thresholds_are_read_by_the_other_commands() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("layers.json");
    let args = ["tune", "--max-rel-l1", "0.05", "--lengths", "2304", "--taus", "0.005,0.02,0.1", "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    for part in ["needle-7m", "layer", "density", "mean density 0.", "layers.json", "score second-cumulant=0.35"] {
        assert!(table.contains(part), "{part} in {table}");
    }
    let settings = LayerSettings::load(&file).expect("settings");
    assert_eq!((settings.layers().len(), settings.tuned_on().model.as_str()), (6, "needle-7m"));
    assert_eq!(settings.tuned_on().max_rel_l1, 0.05);
    let sparse = settings.layers().iter().position(|layer| *layer == LayerSetting::Tau(0.1));
    let sparse = sparse.expect("a layer that bears the largest threshold");

    // The bound holds on the tuning prompt, layer by layer.
    let compared = |methods: &str, more: &[&str]| -> Vec<Value> {
        let args = ["--context", "2304", "--layers", "0,1,2,3,4,5", "--json", "--methods", methods];
        let stdout = stdout_of("compare", &[&args[..], more].concat());
        let rows = stdout.lines().map(|line| serde_json::from_str::<Value>(line).expect("a JSON object a line"));
        rows.filter(|row| row["head"] == -1).collect()
    };
    let tuned = compared("s2o", &["--layers-file", text(&file)]);
    assert_eq!(tuned.len(), 6);
    for row in &tuned {
        assert!(row["rel_l1"].as_f64() <= Some(0.05), "{row}");
    }
    let by_spec = compared(&format!("s2o:layers={}", text(&file)), &[]);
    let densities = |rows: &[Value]| rows.iter().map(|row| row["density"].clone()).collect::<Vec<_>>();
    assert_eq!(densities(&by_spec), densities(&tuned));
    let largest = compared("s2o:tau=0.1", &[]);
    assert_eq!(largest[sparse]["density"], tuned[sparse]["density"]);

    let prefill = stdout_of("prefill", &["--context", "2304", "--layers-file", text(&file), "-n", "1"]);
    assert!(prefill.contains("tau by layer, stop-rule all"), "{prefill}");
}

#[test]
fn a_bound_of_zero_leaves_everything_dense() {
    let directory = TempDir::new().expect("a temporary directory");
    let (file, prompt) = (directory.path().join("layers.json"), directory.path().join("prompt.txt"));
    std::fs::write(&prompt, "The grass is green. The sky is blue. ".repeat(200)).expect("written");
    let args = ["--prompt-file", text(&prompt), "--context", "600", "--dense-below", "0", "--segment", "128"];
    let more = ["--taus", "0.1", "--json", "--save", text(&file)];
    let output = run("evaluate", &[&["tune", "--max-rel-l1", "0"], &args[..], &more].concat());
    assert!(output.status.success());
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let rows: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().all(|row| row["tau"].is_null() && row["density"] == 1.0), "{stdout}");
    let settings = LayerSettings::load(&file).expect("settings");
    assert!(settings.layers().iter().all(|layer| *layer == LayerSetting::Dense));
    assert_eq!(settings.tuned_on().prompt_tokens, [600]);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("layers.json");
    let tuned_on = r#"{"model":"other","prompt_tokens":[],"max_rel_l1":0.1,"options":""}"#;
    std::fs::write(&file, format!(r#"{{"version":1,"tuned_on":{tuned_on},"layers":["dense"]}}"#)).expect("written");
    for command in ["prefill", "compare"] {
        let error = error_of(command, &["--layers-file", text(&file), "--context", "100"]);
        assert!(error.contains("expected 6 layers as the model has, got settings for 1"), "{error}");
    }
    let spec = format!("s2o:layers={}", text(&file));
    let error = error_of("compare", &["--methods", &spec, "--context", "100", "--layers", "2"]);
    assert!(error.contains("expected layers 0 to 0, got a call for layer 2"), "{error}");
    for (args, part) in [
        (&["--max-rel-l1=-1"][..], "expected a number of at least 0, got -1"),
        (&["--max-rel-l1", "0.1", "--tau", "0.1"], "--tau: expected none of the flags that tuning decides"),
        (&["--max-rel-l1", "0.1", "--taus", "1"], "tau: expected a number in [0, 1), got 1"),
        (&["--max-rel-l1", "0.1", "--lengths", "500"], "expected at least 2048 tokens"),
        (&["--max-rel-l1", "0.1", "--prompt-file", "none"], "cannot read none"),
    ] {
        let error = error_of("evaluate", &[&["tune"], args].concat());
        assert!(error.contains(part), "{args:?}: {error}");
    }
    assert_eq!(run("evaluate", &["tune"]).status.code(), Some(2));
}
