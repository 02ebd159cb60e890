//! `evaluate report --out`: the report of a journal that the test writes.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_has, assert_refused, stdout_of, text};

/// An outcome of item `index` of `task`, right if `score` is 1.
fn outcome(task: &str, tokens: usize, index: u64, method: &str, score: f64) -> Value {
    let is_dense = method == "dense";
    json!({
        "sample": format!("{task}-{tokens}-i{index}-s0"), "method": method, "model": "tiny", "dtype": "bf16",
        "device": "cuda", "template": "llama3", "chunk": "auto", "task": task, "context_tokens": tokens,
        "depth": null, "index": index, "seed": 0, "prompt_tokens": tokens - 3,
        "density": if is_dense { 1.0 } else { 0.25 }, "layer_density": [],
        "prefill_seconds": if is_dense { 6.0 } else { 1.5 }, "kind": "answer",
        "prediction": if score == 1.0 { " 42" } else { " x | y" }, "references": ["42"], "score": score,
    })
}

/// Four items of one task and two of another at 4096 and 8192 tokens. `s2o` loses one of the four at 8192.
fn outcomes() -> Vec<Value> {
    let mut all = Vec::new();
    for tokens in [4096, 8192] {
        for (task, items) in [("vt", 4), ("cwe", 2)] {
            for index in 0..items {
                let is_lost = (task, tokens, index) == ("vt", 8192, 2);
                all.push(outcome(task, tokens, index, "dense", 1.0));
                all.push(outcome(task, tokens, index, "s2o:tau=0.05", if is_lost { 0.0 } else { 1.0 }));
            }
        }
    }
    all
}

fn write(directory: &Path, outcomes: &[Value]) {
    let lines = [json!({"format": "s2o-eval outcomes", "version": 1})].into_iter().chain(outcomes.iter().cloned());
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    fs::create_dir_all(directory).expect("made");
    fs::write(directory.join("outcomes.jsonl"), lines).expect("written");
}

/// A directory with the run and the place of the report.
struct Place(TempDir);

impl Place {
    fn new(outcomes: &[Value]) -> Self {
        let place = Self(TempDir::new().expect("a directory"));
        write(&place.run(), outcomes);
        place
    }

    fn run(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("a report")
    }

    fn report(&self) -> String {
        stdout_of("evaluate", &["report", text(&self.run()), "--out", text(&self.out())])
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.out().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Both files of each picture are whole, and the text shows it.
    fn assert_are_pictures(&self, names: &[&str]) {
        for name in names {
            let png =
                fs::read(self.out().join(format!("{name}.png"))).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xaeB`\x82"), "{name}");
            let svg = self.file(&format!("{name}.svg"));
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
            assert!(self.file("report.md").contains(&format!("]({name}.png)")), "{name}");
        }
    }
}

#[test]
fn a_report_has_the_numbers_of_the_journal() {
    let place = Place::new(&outcomes());
    let runs = "outcomes,date,commit,device,source,command\n\
        24,2026-11-25,abc123,NVIDIA H200,\"tiny: Llama, 8.0B parameters\",evaluate run --model tiny --out run\n";
    fs::write(place.run().join("runs.csv"), runs).expect("written");
    let said = place.report();
    assert_has(&said, &["a report/report.md: 24 outcomes, 3 pictures, table.csv, differences.csv"]);
    let report = place.file("report.md");
    assert_has(
        &report,
        &[
            "# tiny: exact and sparse attention\n",
            "| model | tiny: Llama, 8.0B parameters |",
            "| device | NVIDIA H200 |",
            "| prompts, by tokens | 6 of 4096, 6 of 8192 |",
            "| commit, date | abc123, 2026-11-25 |",
            // Every task has the same weight: 100 - 25 / 2.
            "- **s2o:tau=0.05** at 8192 tokens: score 87.5 %, -12.5 points from exact attention (95 % interval -",
            ", which includes 0). Of 6 items 1 are worse and 0 better. Density 0.250.",
            "Density 0.250. The prefill is 4.00 times as fast.",
            "2 tasks with the same weight",
            "| dense | 100.0 | 100.0 |\n| s2o:tau=0.05 | 100.0 | 87.5 |",
            "| s2o:tau=0.05 | 0.0 | -12.5 |",
            "| s2o:tau=0.05 | 0.250 | 0.250 |",
            "| dense | 6.00 s | 6.00 s |\n| s2o:tau=0.05 | 1.50 s | 1.50 s |",
            "| s2o:tau=0.05 | 4.00 | 4.00 |",
            "| vt | 8192 | 4 | 100.0 | 75.0 |",
            "| vt-8192-i2-s0 | s2o:tau=0.05 | 0.0 | 100.0 | `42` | `x \\| y` | `42` |",
            "| `s2o:tau=0.05` | S2O, default settings; with tau=0.05 |",
            "s2o evaluate run --model tiny --out run\n",
            "s2o evaluate report ",
            "/a report'\n",
        ],
    );
    // One heading of the first level, and no cell with two numbers.
    assert_eq!(report.lines().filter(|line| line.starts_with("# ")).count(), 1);
    assert!(!report.contains(" / "), "{report}");
    place.assert_are_pictures(&["score-by-length", "density-by-length", "speed-up-by-length"]);

    let differences = place.file("differences.csv");
    let mut reader = csv::Reader::from_reader(differences.as_bytes());
    let header = reader.headers().expect("a header").clone();
    let column = |name: &str| header.iter().position(|it| it == name).unwrap_or_else(|| panic!("{name}"));
    let [task, method, low, high] = ["task", "method", "difference_low", "difference_high"].map(column);
    let last = reader.records().map(|row| row.expect("a row")).last().expect("rows");
    assert_eq!((&last[task], &last[method]), ("all tasks", "s2o:tau=0.05"));
    let [low, high]: [f64; 2] = [low, high].map(|column| last[column].parse().expect("a number"));
    assert!(low < -0.125 && high > 0.0, "{low} {high}");
    assert_eq!(place.file("differing-items.csv").lines().count(), 1 + 1);
    assert_eq!(place.file("table.csv").lines().count(), 1 + 8 + 4);
    // The directory of the run is only read.
    assert!(!place.run().join("table.md").exists());
}

#[test]
fn a_report_replaces_the_older_one_and_nothing_else() {
    let place = Place::new(&outcomes());
    place.report();
    fs::write(place.out().join("notes.md"), "mine").expect("written");
    let sparse: Vec<Value> = outcomes().into_iter().filter(|outcome| outcome["method"] != "dense").collect();
    write(&place.run(), &sparse);
    place.report();
    assert_eq!(place.file("notes.md"), "mine");
    let report = place.file("report.md");
    let parts = ["Exact attention was not run", "with `dense` among", "| s2o:tau=0.05 | 100.0 | 87.5 |", "no runs.csv"];
    assert_has(&report, &parts);
    for part in ["Difference from", "times as fast", "Items whose score"] {
        assert!(!report.contains(part), "{part} in {report}");
    }
    place.assert_are_pictures(&["score-by-length", "density-by-length"]);
    for file in ["speed-up-by-length.png", "speed-up-by-length.svg"] {
        assert!(!place.out().join(file).exists(), "{file}");
    }
}

#[test]
fn one_length_and_passages_have_a_report_too() {
    let short: Vec<Value> = outcomes().into_iter().filter(|outcome| outcome["context_tokens"] == 4096).collect();
    let place = Place::new(&short);
    place.report();
    place.assert_are_pictures(&["score-by-length"]);
    let none = "## Items whose score differs from that of exact attention\n\nNone.\n";
    assert_has(&place.file("report.md"), &[none, "| dense | 100.0 |\n| s2o:tau=0.05 | 100.0 |"]);

    let passage = |method: &str, loss: f64| {
        let mut outcome = outcome("perplexity", 8192, 0, method, 1.0);
        let object = outcome.as_object_mut().expect("an object");
        for key in ["prediction", "references", "score"] {
            object.remove(key);
        }
        object.extend([("kind".to_owned(), json!("perplexity")), ("loss".to_owned(), json!(loss))]);
        object.insert("likeliest".to_owned(), json!([1, 2]));
        outcome
    };
    let place = Place::new(&[passage("dense", 2.0), passage("s2o", 2.5)]);
    assert_has(&place.report(), &["2 outcomes, 0 pictures"]);
    let report = place.file("report.md");
    assert_has(&report, &["### Perplexity", "| perplexity | 8192 | s2o | auto | 12.182 | 0.250 | 1.000 |"]);
    assert!(!report.contains("## Result"), "{report}");
}

#[test]
fn what_cannot_be_reported_is_refused() {
    let other = |key: &str, value: &str| {
        let mut all = outcomes();
        all.last_mut().expect("outcomes")[key] = value.into();
        all
    };
    let refused = |outcomes: &[Value], parts: &[&str]| {
        let place = Place::new(outcomes);
        let (run, out) = (place.run(), place.out());
        for part in parts {
            assert_refused("evaluate", &["report", text(&run), "--out", text(&out)], &[(&[], part)]);
        }
        assert!(!out.exists(), "it leaves no file");
    };
    refused(&[], &["outcomes.jsonl: expected outcomes, got none; `s2o evaluate run` computes them"]);
    let one = "one model, precision, device and chat template, got tiny (bf16, cuda, template llama3) and ";
    refused(&other("model", "large"), &[one, "and large (bf16, cuda", "run each with its own --out"]);
    refused(&other("device", "cpu"), &[one, "and tiny (bf16, cpu, template llama3)"]);
    let apart = [outcome("vt", 4096, 0, "dense", 1.0), outcome("vt", 4096, 1, "s2o", 1.0)];
    refused(&apart, &["expected a sample with the outcomes of all methods, got none"]);

    let place = Place::new(&outcomes());
    let missing = place.0.path().join("missing");
    let out = place.out();
    let part = "expected the directory of `s2o evaluate run --out`: cannot read ";
    assert_refused("evaluate", &["report", text(&missing), "--out", text(&out)], &[(&[], part)]);
    // The place is checked before the outcomes are read.
    let file = place.0.path().join("file");
    fs::write(&file, "").expect("written");
    for inside in [file.clone(), file.join("report")] {
        let part = format!("cannot write {}", inside.display());
        assert_refused("evaluate", &["report", text(&missing), "--out", text(&inside)], &[(&[], &part)]);
    }
    fs::create_dir_all(out.join("report.md")).expect("made");
    let part = format!("cannot write {}", out.join("report.md").display());
    assert_refused("evaluate", &["report", text(&missing), "--out", text(&out)], &[(&[], &part)]);
    fs::remove_dir(out.join("report.md")).expect("removed");
    fs::write(place.run().join("runs.csv"), "date\n1,2\n").expect("written");
    let part = "runs.csv: expected the rows that `evaluate run` writes";
    assert_refused("evaluate", &["report", text(&place.run()), "--out", text(&out)], &[(&[], part)]);
}
