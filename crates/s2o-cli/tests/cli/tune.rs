//! `evaluate tune`, and the settings that it writes in `prefill` and `compare`.

use candle_s2o::{LayerSetting, LayerSettings};
use serde_json::Value;
use tempfile::TempDir;

use crate::{ALL_LAYERS, assert_has, assert_misused, assert_refused, rows_of, stdout_of, text};

#[test]
fn tuned_thresholds_are_read_by_the_other_commands() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("layers.json");
    let args = ["tune", "--max-rel-l1", "0.05", "--lengths", "2304", "--taus", "0.005,0.02,0.1", "--save", text(&file)];
    let table = stdout_of("evaluate", &args);
    let parts = ["needle-11m", "layer", "density", "mean density 0.", "layers.json", "score second-cumulant=0.35"];
    assert_has(&table, &parts);
    let settings = LayerSettings::load(&file).expect("settings");
    assert_eq!((settings.layers().len(), settings.tuned_on().model.as_str()), (10, "needle-11m"));
    assert_eq!(settings.tuned_on().max_rel_l1, 0.05);
    let sparse = settings.layers().iter().position(|layer| *layer == LayerSetting::Tau(0.1));
    let sparse = sparse.expect("a layer that bears the largest threshold");

    // The bound holds on the tuning prompt, layer by layer.
    let compared = |methods: &str, more: &[&str]| -> Vec<Value> {
        let args = ["--context", "2304", "--layers", ALL_LAYERS, "--json", "--methods", methods];
        rows_of("compare", &[&args[..], more].concat()).into_iter().filter(|row| row["head"] == -1).collect()
    };
    let tuned = compared("s2o", &["--layers-file", text(&file)]);
    assert_eq!(tuned.len(), 10);
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
    let rows = rows_of("evaluate", &[&["tune", "--max-rel-l1", "0"], &args[..], &more].concat());
    assert_eq!(rows.len(), 10);
    assert!(rows.iter().all(|row| row["tau"].is_null() && row["density"] == 1.0), "{rows:?}");
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
    let (args, part) = (["--layers-file", text(&file)], "expected 10 layers as the model has, got settings for 1");
    for command in ["prefill", "compare"] {
        let missing = ["--layers-file", "no/such.json"];
        let cases: &[(&[&str], &str)] = &[(&args, part), (&missing, "--layers-file: no/such.json: No such file")];
        assert_refused(command, &["--context", "100"], cases);
    }
    let spec = format!("s2o:layers={}", text(&file));
    let part = "expected layers 0 to 0, got a call for layer 2";
    assert_refused("compare", &["--context", "100", "--layers", "2"], &[(&["--methods", &spec], part)]);
    let inside = file.join("x");
    let cases: &[(&[&str], &str)] = &[
        (&["--max-rel-l1", "0.05", "--taus", "2"], "--taus: s2o: tau: expected a number in [0, 1), got 2"),
        (
            &["--max-rel-l1", "-1"],
            "--max-rel-l1: bound on the relative L1 error: expected a number of at least 0, got -1",
        ),
        (&["--max-rel-l1", "0.1", "--save", text(&inside)], "--save: expected a file in a directory that exists"),
        (&["--max-rel-l1", "0.1", "--tau", "0.1"], "--tau: expected none of the flags that tuning decides"),
        (&["--max-rel-l1", "0.1", "--taus", "1"], "tau: expected a number in [0, 1), got 1"),
        (&["--max-rel-l1", "0.1", "--lengths", "500"], "expected at least 2048 tokens"),
        (&["--max-rel-l1", "0.1", "--prompt-file", "none"], "cannot read none"),
    ];
    assert_refused("evaluate", &["tune"], cases);
    // A file name that is too long. The model does not exist either, which is found later.
    let long = directory.path().join("x".repeat(300));
    let args = ["tune", "--max-rel-l1", "0.1", "--model", "no/such.gguf", "--save"];
    assert_refused("evaluate", &args, &[(&[text(&long)], "cannot write ")]);
    assert_misused("evaluate", &[&["tune"]]);
}
