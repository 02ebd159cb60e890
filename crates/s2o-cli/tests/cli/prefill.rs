//! `prefill`: its JSON, its text, and its options.

use serde_json::Value;

use crate::{ALL_LAYERS, assert_has, number, run, stdout_of};

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of("prefill", args)).expect("one JSON object")
}

#[test]
fn prefill_compares_dense_and_s2o() {
    let object = json_of(&["--context", "4096", "--json"]);
    let mut keys: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort();
    let expected = "answer_dense answer_s2o density expected model precision precision_dense rel_l1 seconds_dense \
                    seconds_s2o tokens top1_agree";
    assert_eq!(keys.join(" "), expected);
    let number = |key: &str| number(&object, key);
    assert_eq!(object["model"], "needle-11m");
    assert!((4033..=4096).contains(&object["tokens"].as_u64().expect("tokens")));
    assert!(number("seconds_dense") > 0.0 && number("seconds_s2o") > 0.0);
    assert!(number("density") > 0.0 && number("density") < 1.0);
    assert!(number("rel_l1") > 0.0 && number("rel_l1") < 0.1);
    assert!(number("top1_agree") > 0.9 && number("top1_agree") <= 1.0);
    assert_eq!(object["expected"].as_str().map(str::len), Some(7));
    assert_eq!(object["answer_dense"], object["expected"]);
    assert_eq!(object["answer_s2o"], object["expected"]);
}

#[test]
fn prefill_is_plain_on_a_pipe() {
    let output = run("prefill", &["--context", "2304", "--threads", "1"]);
    assert!(output.status.success());
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    // A line when a phase begins; a phase that takes ten seconds has more, with the time so far.
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let phases: Vec<&str> = stderr.lines().filter(|line| !line.ends_with(" s")).collect();
    let prompt = stdout.lines().find(|line| line.starts_with("prompt")).expect("a description of the prompt");
    let tokens = prompt.split(" of ").nth(1).expect("its length");
    assert_eq!(phases, ["loading".to_owned(), format!("prefill, dense: {tokens}"), format!("prefill, S2O: {tokens}")]);
    let quiet = run("prefill", &["--context", "100", "-n", "1", "--quiet"]);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
    assert!(!stdout.contains(['\x1b', '│', '█', '→']), "{stdout}");
    let parts = ["needle-11m", "prefill", "attention", "density", "cosine", "right", "layer   9 #", "1 thread,"];
    assert_has(&stdout, &parts);
    assert!(!stdout.contains("wrong"), "{stdout}");
}

#[test]
fn a_dense_prefill_has_no_chart() {
    let short = stdout_of("prefill", &["--context", "500"]);
    // Three tokens give no rate.
    assert!(short.contains("decode tokens/s"), "{short}");
    assert!(!stdout_of("prefill", &["--context", "500", "-n", "3"]).contains("decode tokens/s"));
    assert!(short.contains("S2O     dense path: the prompt is shorter than 2048 tokens (--dense-below)\n"), "{short}");
    let skipped = stdout_of("prefill", &["--context", "2304", "--skip-layers", ALL_LAYERS]);
    assert!(skipped.contains("S2O computed all key tiles of every layer"), "{skipped}");
    for text in [short, skipped] {
        assert!(text.contains("density") && !text.contains("layer   0"), "{text}");
    }
}

#[test]
fn prefill_runs_one_method_alone() {
    let dense = json_of(&["--attention", "dense", "--context", "1024", "--json"]);
    for key in ["seconds_s2o", "density", "rel_l1", "top1_agree", "answer_s2o"] {
        assert_eq!(dense[key], Value::Null, "{key}");
    }
    assert_eq!(dense["answer_dense"], dense["expected"]);

    // The user's own prompt: only S2O, and no expected answer. A threshold of 0 never stops.
    let own = ["--prompt", "What is a passkey?", "-n", "3", "--json", "--dense-below", "0", "--tau", "0"];
    let own = json_of(&own);
    for key in ["seconds_dense", "rel_l1", "answer_dense", "expected"] {
        assert_eq!(own[key], Value::Null, "{key}");
    }
    assert!(own["answer_s2o"].is_string());
    assert_eq!(own["density"], 1.0);

    let sparse = json_of(&["--attention", "s2o", "--context", "3000", "--json"]);
    let skipped = ["--attention", "s2o", "--context", "3000", "--json", "--skip-layers", ALL_LAYERS];
    assert!(sparse["density"].as_f64() < Some(1.0));
    assert_eq!(json_of(&skipped)["density"], 1.0);
}

#[test]
fn a_large_error_is_a_warning_until_it_has_a_bound() {
    // Settings under which layer 9 stops far too early.
    let flags = "--context 2048 --dense-below 0 --segment 128 --tile-k 16 --stop-rule mean --score mean --front-sink 0 \
                 --recent 0 --tau 0.99 --probe-stride 16 --attention s2o -n 1";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let text = stdout_of("prefill", &flags);
    assert_has(&text, &["warning: the error is above 0.3 in layer 9", "--skip-layers 9 makes"]);
    let text = stdout_of("prefill", &[&flags[..], &["--max-error", "0.2"]].concat());
    assert_has(&text, &["were computed again to keep their error below the bound"]);
    assert!(!text.contains("warning"), "{text}");
}

#[test]
fn a_prompt_comes_from_a_file_or_stdin_and_a_question_may_follow() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("document");
    std::fs::write(&file, "The pass key is 4711.\n").expect("a file");
    let tokens = |args: &[&str]| json_of(&[args, &["-n", "1", "--json"]].concat())["tokens"].clone();
    let path = crate::text(&file);
    let both = tokens(&["--prompt-file", path, "--prompt", "What is the pass key?"]);
    assert_eq!(both, tokens(&["--prompt", "The pass key is 4711.\n\nWhat is the pass key?"]));

    let mut command = crate::command("prefill");
    command.args(["--prompt-file", "-", "-n", "1", "--json"]).stdin(std::fs::File::open(&file).expect("the file"));
    let output = command.output().expect("the program runs");
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(object["tokens"], tokens(&["--prompt-file", path]));

    std::fs::write(&file, "word ".repeat(140_000)).expect("a file");
    let error = crate::error_of("prefill", &["--prompt-file", path]);
    assert!(error.contains("the model 131072 positions: --context 130560 keeps its beginning and end"), "{error}");
}

#[test]
fn compare_wins_over_attention() {
    for attention in ["dense", "s2o"] {
        let both = json_of(&["--attention", attention, "--compare", "--context", "2100", "--json"]);
        assert!(both["seconds_dense"].is_number() && both["seconds_s2o"].is_number(), "{both}");
    }
}

#[test]
fn tracing_writes_where_the_time_goes() {
    let directory = tempfile::tempdir().expect("a directory");
    let status = crate::command("prefill")
        .args(["--prompt", "The", "-n", "1", "--tracing"])
        .current_dir(directory.path())
        .output()
        .expect("the program runs")
        .status;
    assert!(status.success());
    let trace = std::fs::read_dir(directory.path()).expect("files").next().expect("a trace").expect("a file");
    let trace = std::fs::read_to_string(trace.path()).expect("text");
    let events: Vec<Value> = serde_json::from_str(&trace).expect("a JSON array of events");
    for name in ["attention", "mlp"] {
        assert!(events.iter().any(|event| event["name"] == name), "{name} in {trace:.200}");
    }
}

#[test]
fn prefill_in_chunks_answers_the_same() {
    let whole = json_of(&["--context", "3000", "--attention", "s2o", "--json"]);
    let chunked = json_of(&["--context", "3000", "--attention", "s2o", "--json", "--chunk", "1024"]);
    assert_eq!(whole["answer_s2o"], whole["expected"]);
    assert_eq!(chunked["answer_s2o"], whole["expected"]);
    let auto = json_of(&["--context", "3000", "--attention", "s2o", "--json", "--chunk", "auto"]);
    assert_eq!(auto["answer_s2o"], whole["answer_s2o"]);
}

#[test]
fn sampling_follows_its_seed() {
    let sampled = |seed: &str| {
        let args = ["--prompt", "The", "-n", "12", "--temperature", "1.5", "--top-k", "500", "--json", "--seed", seed];
        json_of(&args)["answer_s2o"].clone()
    };
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
}

#[test]
fn wrong_options_say_expected_and_got() {
    let cases: &[(&[&str], &str)] = &[
        (&["--tau", "1.5"], "error: --tau: expected a number in [0, 1), got 1.5"),
        (&["--tau", "-1"], "error: --tau: expected a number in [0, 1), got -1"),
        (&["--segment", "100"], "error: --segment: expected a positive multiple of tile-q = 128, got 100"),
        (&["--preset", "paper", "--tile-k", "0"], "error: --tile-k: expected 1 to 1024, got 0"),
        (&["--probe-stride", "0"], "error: --probe-stride: expected a positive number of tokens, got 0; `off`"),
        (
            &["--score", "second-cumulant=-1"],
            "error: --score: second-cumulant=c: expected a finite number >= 0, got -1",
        ),
        (&["--temperature", "-1"], "error: --temperature: expected a finite number >= 0, got -1"),
        (&["--temperature", "1", "--top-p", "-0.5"], "error: --top-p: expected a number in (0, 1], got -0.5"),
        (&["--repeat-penalty", "-2"], "error: --repeat-penalty: expected a finite number > 0, got -2"),
        (&["--depth", "-1"], "error: --depth: expected a number from 0 to 1, got -1"),
        (&["--skip-layers", "10", "--context", "100"], "--skip-layers: expected layers 0 to 9, got 10"),
        (
            &["--workspace-mib", "0", "--context", "3000"],
            "error: --workspace-mib (S2O_WORKSPACE_MIB): expected at least ",
        ),
        (&["--context", "10"], "--context: a prompt of passkey needs at least 77 tokens with this tokenizer, got 10"),
        (&["--tokenizer-file", "no-such-file", "--context", "100"], "no-such-file"),
        (&["--depth", "2"], "expected a number from 0 to 1, got 2"),
        (&["--prompt", "a", "--context", "0"], "--context: expected at least 1 token, got 0"),
        (&["--tokens", "0"], "--tokens: expected at least 1 token, got 0"),
        (&["--prompt", ""], "prompt: expected a text, got none"),
        (&["--context", "99999999"], "--context: expected at most 131072, the positions of needle-11m, got 99999999"),
        (&["--prompt-file", "no-such-file"], "no-such-file"),
        (&["--revision", "main"], "expected a Hugging Face id"),
        (
            &["--linear", "int8", "--device", "cpu", "--context", "100"],
            "linear layers in int8: expected bf16 or f16 on an NVIDIA GPU of compute capability 9.0 (H100, H200) and its",
        ),
        (&["--dtype", "gguf"], "--dtype gguf: expected a .gguf file as --model, got needle-11m"),
    ];
    for (args, part) in cases {
        // Other lines on stderr are tested elsewhere.
        let output = run("prefill", args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        let error = stderr.lines().last().unwrap_or_default();
        assert!(error.starts_with("error: ") && error.contains(part), "{args:?}: {stderr}");
    }
}

#[test]
fn exact_attention_on_the_wide_cache_is_the_reference_of_a_narrow_one() {
    let flags = ["--compare", "--context", "2100", "-n", "8", "--json", "--kv", "8bit"];
    let narrow = json_of(&flags);
    assert_eq!(narrow["precision"], "f32, KV cache in 8 bits");
    assert_eq!(narrow["precision_dense"], "f32");
    assert_eq!(narrow["answer_s2o"], narrow["expected"]);
    let wide = json_of(&flags[..6]);
    assert_eq!(wide["precision"], "f32");
    assert_eq!(wide["answer_dense"], narrow["answer_dense"]);
    let error = |run: &Value| run["rel_l1"].as_f64().expect("a number");
    assert!(error(&narrow) > 5.0 * error(&wide) && error(&narrow) < 0.05, "{} {}", error(&narrow), error(&wide));
}

#[test]
fn prompts_are_checked_before_the_weights_are_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let model = directory.path().join("model");
    std::fs::create_dir(&model).expect("a directory");
    // There are no weights, which is found last.
    std::fs::write(model.join("config.json"), s2o_needle_11m::CONFIG).expect("written");
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("written");
        crate::text(&path).to_owned()
    };
    let (empty, blank, good) = (file("empty", ""), file("blank", " \n\t\n"), file("good", "a text"));
    let too_long = "--context: expected at most 131072, the positions of model, got 99999999";
    let cases: &[(&[&str], &str)] = &[
        (&["--prompt", ""], "prompt: expected a text, got none"),
        (&["--prompt", " "], "prompt: expected a text, got only white space"),
        (&["--prompt-file", &empty], "empty: expected a text, got none"),
        (&["--prompt-file", &empty, "--prompt", "a question"], "empty: expected a text, got none"),
        (&["--prompt-file", &blank], "blank: expected a text, got only white space"),
        (&["--prompt-file", crate::text(directory.path())], "cannot read "),
        (&["--context", "99999999"], too_long),
        (&["--tokens", "131073"], "--tokens: expected at most 131072"),
        (&["--prompt-file", &good], "tokenizer.json is missing"),
    ];
    for command in ["prefill", "compare", "heatmap", "statistics"] {
        let cases = if command == "prefill" { cases } else { &cases[5..7] };
        crate::assert_refused(command, &["--model", crate::text(&model)], cases);
    }
}
