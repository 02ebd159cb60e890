//! `evaluate`: its files, the continuation of an interrupted run, and errors.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_has, assert_misused, assert_refused, run, stdout_of, text};

const SHORT: [&str; 9] = ["run", "--tasks", "passkey", "--lengths", "300,400", "--items", "2", "--out", "DIRECTORY"];

/// Short passkey prompts in `directory`, with `more` arguments.
fn short<'a>(directory: &'a TempDir, more: &[&'a str]) -> Vec<&'a str> {
    let args = SHORT.iter().map(|&arg| if arg == "DIRECTORY" { text(directory.path()) } else { arg });
    args.chain(more.iter().copied()).collect()
}

fn file(directory: &TempDir, name: &str) -> String {
    fs::read_to_string(directory.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A table without times, whose last bit may differ when they are read from JSON.
fn timeless(table: &str) -> Vec<Vec<String>> {
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let header = reader.headers().expect("a header").clone();
    let cells = |line: csv::StringRecord| {
        let timeless = header.iter().zip(&line).filter(|(name, _)| *name != "prefill_seconds");
        timeless.map(|(_, cell)| cell.to_owned()).collect()
    };
    reader.records().map(|record| cells(record.expect("a line"))).collect()
}

#[test]
fn methods_are_run_at_equal_densities() {
    let directory = TempDir::new().expect("a directory");
    let methods = "dense,s2o:segment=128,sliding-window:sink=16";
    let args = ["run", "--tasks", "passkey", "--lengths", "1024", "--items", "1", "--out", text(directory.path())];
    let args = [&args[..], &["--methods", methods, "--densities", "0.9,0.001", "--quiet"]].concat();
    stdout_of("evaluate", &args);
    let knobs = file(&directory, "knobs.csv");
    let settings: Vec<&str> = knobs.lines().skip(1).map(|line| line.split(',').nth(3).expect("a setting")).collect();
    assert!(settings[0].starts_with("s2o:segment=128:dense-below=0:tau=0.0"), "{knobs}");
    assert!(settings[2].starts_with("sliding-window:sink=16:dense-below=0:window="), "{knobs}");
    assert_eq!((settings.len(), settings[1], settings[3]), (4, "", ""), "{knobs}");

    let table = file(&directory, "table.csv");
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let column = |name: &str| table.lines().next().and_then(|header| header.split(',').position(|it| it == name));
    let (method, density) = (column("method").expect("methods"), column("density").expect("densities"));
    let rows = reader.records().map(|row| row.expect("a row"));
    let rows: Vec<(String, f64)> =
        rows.map(|row| (row[method].to_owned(), row[density].parse().expect("a number"))).collect();
    let names: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    let own = ["dense", "s2o:segment=128", "sliding-window:sink=16"];
    assert_eq!(names, [&own[..], &["s2o:segment=128@0.9", "sliding-window:sink=16@0.9"]].concat());
    for (method, density) in &rows[3..] {
        assert!((density - 0.9).abs() < 0.05, "{method}: {density}");
    }

    stdout_of("evaluate", &args);
    assert_eq!(file(&directory, "knobs.csv"), knobs);
    assert_eq!(timeless(&file(&directory, "table.csv")), timeless(&table));
    assert_refused(
        "evaluate",
        &["run", "--densities"],
        &[(&["0.5,1"], "--densities: expected numbers between 0 and 1")],
    );
}

#[test]
fn a_run_leaves_outcomes_and_tables() {
    let directory = TempDir::new().expect("a directory");
    let args = ["--methods", "dense,s2o:tau=0.05:dense-below=0", "--depths", "0,1", "--threads", "1", "--quiet"];
    let output = run("evaluate", &short(&directory, &args));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr, "");
    let spec = "s2o:tau=0.05:dense-below=0";
    assert_has(&stdout, &["needle-11m: Qwen3", "none (auto)", "8 samples", spec, "1 thread,", "table.md are in"]);
    let outcomes = file(&directory, "outcomes.jsonl");
    assert_eq!(outcomes.lines().count(), 1 + 16);
    let last: Value = serde_json::from_str(outcomes.lines().last().expect("lines")).expect("JSON");
    assert_eq!((&last["task"], &last["context_tokens"]), (&"passkey".into(), &400.into()));
    let said = |key: &str| last[key].as_str().map(str::to_owned).expect("a text");
    assert!(said("prediction").contains(last["references"][0].as_str().expect("an answer")), "{last}");
    let table = file(&directory, "table.csv");
    assert!(table.lines().nth(1).is_some_and(|line| line.starts_with("passkey,,300,dense,auto,4,")), "{table}");
    assert!(file(&directory, "table.md").contains("### passkey by depth and length: dense"));

    let runs = file(&directory, "runs.csv");
    assert!(runs.starts_with("outcomes,date,commit,device,source,command\n16,"), "{runs}");
    assert_has(&runs, &["needle-11m: Qwen3", ",\"evaluate run --tasks passkey --lengths 300,400"]);

    let again = stdout_of("evaluate", &["report", text(directory.path())]);
    assert!(stdout.contains(again.trim_end()), "{again} in {stdout}");
    assert_eq!(timeless(&file(&directory, "table.csv")), timeless(&table));
}

#[test]
fn a_run_names_the_lengths_at_which_s2o_is_dense() {
    let directory = TempDir::new().expect("a directory");
    let lines = |methods: &str| -> Vec<String> {
        let args = ["--lengths", "2048,2049", "--methods", methods, "--dry-run"];
        let text = stdout_of("evaluate", &short(&directory, &args));
        text.lines().filter(|line| line.starts_with("dense  ")).map(str::to_owned).collect()
    };
    let of_s2o = "dense     s2o, s2o-paper in prompts of fewer than 2048 tokens (dense-below): 300, 400, 2048";
    let of_400 = "dense     s2o:dense-below=400 in prompts of fewer than 400 tokens (dense-below): 300, 400";
    assert_eq!(lines("s2o,dense,s2o:dense-below=400,s2o-paper"), [of_400, of_s2o]);
    assert!(lines("dense,s2o:dense-below=0,s2o:dense-below=299,xattention").is_empty());
}

#[test]
fn a_run_goes_on_after_an_interruption() {
    let directory = TempDir::new().expect("a directory");
    let first = run("evaluate", &short(&directory, &["--methods", "dense"]));
    let said = "Ctrl-C stops the run; the same command goes on where it stopped\n4 outcomes";
    assert_has(&String::from_utf8_lossy(&first.stderr), &[said]);
    let (outcomes, table) = (file(&directory, "outcomes.jsonl"), file(&directory, "table.csv"));
    fs::write(directory.path().join("outcomes.jsonl"), &outcomes[..outcomes.len() - 50]).expect("written");
    let stdout = stdout_of("evaluate", &short(&directory, &["--methods", "dense"]));
    assert!(stdout.contains("3 outcomes exist"), "{stdout}");
    let now = file(&directory, "outcomes.jsonl");
    assert_eq!(now.lines().take(4).collect::<Vec<_>>(), outcomes.lines().take(4).collect::<Vec<_>>());
    assert_eq!(now.lines().count(), 5);
    assert_eq!(timeless(&file(&directory, "table.csv")), timeless(&table));

    // First nothing is left to do, then everything.
    assert_eq!(file(&directory, "runs.csv").lines().count(), 1 + 2);
    assert!(stdout_of("evaluate", &short(&directory, &["--methods", "dense"])).contains("4 outcomes exist"));
    assert_eq!(file(&directory, "outcomes.jsonl"), now);
    assert!(!stdout_of("evaluate", &short(&directory, &["--methods", "dense", "--fresh"])).contains("outcomes exist"));
    assert_eq!(file(&directory, "runs.csv").lines().count(), 1 + 1);
}

#[test]
fn the_cost_is_said_before_the_first_sample() {
    let directory = TempDir::new().expect("a directory");
    let args = ["--methods", "dense,s2o", "--chunk", "whole,256"];
    let planned = stdout_of("evaluate", &short(&directory, &[&args[..], &["--dry-run"]].concat()));
    // Two items, two chunk sizes.
    let rows = ["| dense                  4            4 |", "| s2o                    4            4 |"];
    let all = ["4 samples, 16 prefills, 5,600 tokens to prefill", "time      about ", "GB of KV cache for each"];
    assert_has(
        &planned,
        &[&all[..], &rows, &["0.04 GB of weights", "an estimate from 256 tokens prefilled in"]].concat(),
    );
    assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0, "it leaves no file");

    let output = run("evaluate", &short(&directory, &args));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let place = |part: &str| stderr.find(part).unwrap_or_else(|| panic!("{part} in {stderr}"));
    assert!(place("measuring the speed") < place("16 prefills") && place("16 prefills") < place("Ctrl-C"), "{stderr}");
    assert!(place("Ctrl-C") < place("\n16 outcomes\n"), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_has(&stdout, &["`s2o evaluate report ", " --out report` makes a report"]);

    // Only the rest counts: one outcome of the journal is gone, and one length is new.
    let outcomes = file(&directory, "outcomes.jsonl");
    let kept: Vec<&str> = outcomes.lines().take(16).collect();
    fs::write(directory.path().join("outcomes.jsonl"), kept.join("\n") + "\n").expect("written");
    let rest = short(&directory, &[&args[..], &["--dry-run"]].concat());
    let rest: Vec<&str> = rest.iter().map(|arg| if *arg == "300,400" { "300,400,500" } else { arg }).collect();
    let planned = stdout_of("evaluate", &rest);
    assert_has(&planned, &["15 outcomes exist", "3 samples, 9 prefills, 4,400 tokens", "400 tokens   500 tokens |"]);
    assert_eq!(file(&directory, "outcomes.jsonl").lines().count(), 16, "nothing is written");

    stdout_of("evaluate", &short(&directory, &[&args[..], &["--quiet"]].concat()));
    let planned = stdout_of("evaluate", &short(&directory, &[&args[..], &["--dry-run"]].concat()));
    assert_has(&planned, &["to do     nothing: all outcomes exist"]);
    let fresh = ["--dry-run", "--fresh", "--densities", "0.5"];
    let planned = stdout_of("evaluate", &short(&directory, &[&args[..], &fresh].concat()));
    assert_has(
        &planned,
        &["16 prefills", "densities at most 8 prefills at equal density and 16 to search their settings"],
    );
    fs::write(directory.path().join("outcomes.jsonl"), "notes").expect("written");
    let part = "got a file that is not a journal; --fresh starts anew";
    assert_refused("evaluate", &short(&directory, &["--dry-run"]), &[(&[], part)]);
}

#[test]
fn files_of_benchmarks_are_run() {
    let directory = TempDir::new().expect("a directory");
    let task = directory.path().join("data/vt");
    fs::create_dir_all(&task).expect("made");
    let line = r#"{"index": 7, "input": "The grass is green. What is 1?", "outputs": ["12"], "length": 12}"#;
    fs::write(task.join("validation.jsonl"), line).expect("written");
    let data = directory.path().join("data");
    let out = directory.path().join("out");
    let args = ["run", "--ruler-dir", text(&data), "--methods", "dense", "--out", text(&out), "--predictions"];
    let stdout = stdout_of("evaluate", &args);
    assert!(stdout.contains("1 samples") && stdout.contains("ruler/vt"), "{stdout}");
    let path = out.join("ruler/needle-11m-dense-chunk-auto/1024/vt.jsonl");
    let prediction: Value = serde_json::from_str(&fs::read_to_string(path).expect("predictions")).expect("one line");
    assert_eq!((&prediction["index"], &prediction["outputs"][0]), (&7.into(), &"12".into()));
}

#[test]
fn perplexity_and_chunks_are_compared() {
    let directory = TempDir::new().expect("a directory");
    let out = text(directory.path());
    let args = ["run", "--tasks", "perplexity,niah", "--lengths", "600", "--last", "100", "--items", "1", "--out", out];
    let stdout = stdout_of("evaluate", &[&args[..], &["--chunk", "whole,256", "--depths", "0.5"]].concat());
    assert_has(&stdout, &["perplexity", "top-1 agrees", "changed", "whole", "256"]);
    let needles = file(&directory, "niah/needle-11m-dense-chunk-whole.json");
    let needles: Value = serde_json::from_str(&needles).expect("JSON");
    assert_eq!((&needles[0]["context_length"], &needles[0]["depth_percent"]), (&600.into(), &50.0.into()));
}

#[test]
fn everything_is_listed() {
    let parts = ["niah_multikey_3", "needle-7m", "ruler", "sliding-window", "options: tau, segment"];
    assert_has(&stdout_of("evaluate", &["list"]), &parts);
}

#[test]
fn what_cannot_be_run_is_refused() {
    let directory = TempDir::new().expect("a directory");
    fs::write(directory.path().join("outcomes.jsonl"), "notes").expect("written");
    let out = text(directory.path());
    let empty = directory.path().join("empty.json");
    fs::write(&empty, "[]").expect("written");
    let cases: &[(&[&str], &str)] = &[
        (&["--tasks", "niha"], "`niha` is not a task: expected one of ruler, keyed, all, needle-7m, niah, "),
        (&["--tasks", "niha"], ", perplexity\n"),
        (&["--methods", "magic"], "`magic` is not a method: expected one of dense, s2o"),
        (&["--methods", "s2o:colour=red"], "s2o: expected tau, segment, dense-tail"),
        (&["--methods", "s2o:tau"], "expected option=value, got tau"),
        (&["--template", "alpaca"], "--template: expected auto, none, llama3, chat-ml, qwen3, got alpaca"),
        (&["--template", "llama3"], "expected one with <|begin_of_text|>, for llama3, got one without"),
        (&["--depths", "1.5"], "--depths: expected numbers from 0 to 1, got 1.5"),
        (&["--depths", "-1"], "--depths: expected numbers from 0 to 1, got -1"),
        (&["--densities", "-0.5"], "--densities: expected numbers between 0 and 1, got -0.5"),
        (&["--lengths", "20"], "needs at least"),
        (&["--lengths", "4096,0"], "--lengths: expected at least 1 token, got 0"),
        (
            &["--tasks", "needle-7m", "--lengths", "300"],
            "expected a length among 4096 and 32768 for needle-7m, got [300]",
        ),
        (&["--ruler-dir", "no/such"], "cannot read no/such"),
        (&["--tasks", "passkey", "--predictions"], "--predictions: expected a task of RULER, which the files are for"),
        (&["--longbench-file", text(&empty)], "line 1: expected at least one record, got an empty list"),
        (&["--ruler-dir", out], "expected TASK/validation.jsonl in it, got none in"),
        (&["--longbench-file", "no.json"], "cannot read no.json"),
        (&["--infinitebench-dir", out], "expected TASK.jsonl in it"),
        (&["--text-file", "no.txt"], "cannot read no.txt"),
        (&["--tasks", "perplexity", "--last", "9000"], "expected 1 to 8191, got 9000"),
        (&["--synthetic", "llama-3.1-8b"], "expected a model whose answers mean something, got made-up weights"),
        (&["--model", "./no/such"], "./no/such is missing: there is no such directory"),
    ];
    let other = directory.path().join("other");
    assert_refused("evaluate", &["run", "--out", text(&other)], cases);
    let long = directory.path().join("long");
    let part = "--lengths: passkey of 200000 tokens: expected at most 131072 positions, those of the model, got 200000";
    let with_answer =
        "--lengths: passkey of 131072 tokens: expected at most 131072 positions, those of the model, got 131";
    let cases: &[(&[&str], &str)] = &[
        (&["--lengths", "4096,200000"], part),
        (&["--lengths", "131072"], with_answer),
        (&["--lengths", "20"], "needs"),
    ];
    assert_refused("evaluate", &["run", "--out", text(&long)], cases);
    assert!(!long.exists(), "it leaves no file");
    let part = "expected s2o-eval outcomes of version 1, got a file that is not a journal; --fresh";
    assert_refused("evaluate", &["run", "--out", out], &[(&[], part)]);
    assert_eq!(file(&directory, "outcomes.jsonl"), "notes");
    assert_refused("evaluate", &["report", text(&other.join("no"))], &[(&[], "cannot read")]);
    assert_misused("evaluate", &[&["run", "--items", "0"], &["run", "--chunk", "half"], &["measure"], &[]]);
}

#[test]
fn files_that_cannot_be_run_are_refused() {
    let directory = TempDir::new().expect("a directory");
    let data = |name: &str, file: &str, content: String| {
        let path = directory.path().join(name).join(file);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(&path, content).expect("written");
        (text(&directory.path().join(name)).to_owned(), text(&path).to_owned())
    };
    let ruler = |input: &str| format!(r#"{{"index": 7, "input": "{input}", "outputs": ["12"], "length": 12}}"#);
    let infinite =
        |input: &str| format!(r#"{{"id": 7, "context": "c", "input": "{input}", "answer": "5", "options": []}}"#);
    let long = |input: &str| {
        json!({"_id": "7", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short",
            "question": input, "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "A",
            "context": "c"})
    };
    let twice = |line: &dyn Fn(&str) -> String| format!("{}\n{}\n", line("What?"), line("Who?"));
    let (ruler, _) = data("ruler", "vt/validation.jsonl", twice(&ruler));
    let (infinite, _) = data("infinite", "passkey.jsonl", twice(&infinite));
    let (_, long) = data("long", "data.json", json!([long("What?"), long("Who?")]).to_string());
    let out = directory.path().join("out");
    let cases: &[(&[&str], &str)] = &[
        (&["--ruler-dir", &ruler], "got two items with the id ruler-vt-12-i7"),
        (&["--infinitebench-dir", &infinite], "got two items with the id infinitebench-passkey-120000-7"),
        (&["--longbench-file", &long], "got two items with the id longbench_v2-120000-7"),
        (&["--infinitebench-dir", &infinite, "--lengths", "1"], "--lengths: a prompt of passkey needs at least "),
        (&["--longbench-file", &long, "--lengths", "1"], "--lengths: a prompt of longbench_v2 needs at least 2 tokens"),
    ];
    assert_refused("evaluate", &["run", "--methods", "dense", "--out", text(&out)], cases);
    let file = directory.path().join("file");
    fs::write(&file, "").expect("written");
    // The model does not exist either, which is found later.
    let inside = file.join("out");
    let part = format!("cannot write {}", inside.display());
    for args in [&["run"][..], &["experiment", "heads"]] {
        assert_refused("evaluate", args, &[(&["--out", text(&inside), "--model", "no/such.gguf"], &part)]);
    }
}
