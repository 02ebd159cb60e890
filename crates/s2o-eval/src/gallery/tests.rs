//! Each kind of entry on small rows, and a page of them.

mod by_layer;

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::report::tests::setting;
use crate::report::{rows, write_csv};
use crate::run::{Finding, Journal, Key, Outcome};

/// A directory with a page and rows.
struct Site {
    directory: TempDir,
}

impl Site {
    fn new(files: &[(&str, &str)]) -> Self {
        let site = Self { directory: TempDir::new().expect("a directory") };
        files.iter().for_each(|(name, text)| site.write(name, text));
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, text).expect("written");
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("a file")
    }

    fn gallery(&self) -> Gallery {
        Gallery { page: self.path("docs/page.md"), rows: self.path("docs/rows"), record: self.path("record") }
    }

    /// What the gallery makes of an entry, and the names of its pictures.
    fn made(&self, name: &str) -> (String, Vec<String>) {
        self.write("docs/page.md", &format!("before\n<!-- gallery: {name} -->\n<!-- /gallery -->\nafter\n"));
        let made = self.gallery().update().unwrap_or_else(|error| panic!("{error}: {:?}", error));
        assert_eq!((made.len(), made[0].line, made[0].name.as_str()), (1, 2, name));
        assert!(made[0].pictures.iter().all(|path| fs::metadata(path).is_ok_and(|file| file.len() > 500)));
        let names =
            made[0].pictures.iter().map(|path| path.file_name().expect("a name").to_string_lossy().into_owned());
        assert_eq!(self.gallery().check().expect("up to date"), made);
        let page = self.read("docs/page.md");
        let body = page.strip_prefix(&format!("before\n<!-- gallery: {name} -->\n"));
        let body = body.and_then(|rest| rest.strip_suffix("<!-- /gallery -->\nafter\n"));
        (body.expect("the rest of the page stays").to_owned(), names.collect())
    }

    /// Why an entry cannot be made: the error and its cause.
    fn refused(&self, name: &str) -> String {
        self.write("docs/page.md", &format!("before\n<!-- gallery: {name} -->\n<!-- /gallery -->\n"));
        let error = self.gallery().update().expect_err("an error");
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        format!("{error}{cause}").replace(&format!("{}/", self.directory.path().display()), "")
    }
}

const MATCHED: &str = "method,density,layers,mse,mae,rel_l1,date,commit,device,source,command
s2o,0.25,2,9,9,9,2026-01-01,old,CPU,model,evaluate experiment matched-density
s2o,0.25,2,0.00191,0.1,0.0128,2026-01-02,abc,CPU,model | x,evaluate experiment matched-density --layers 2
pbs,0.25,2,0.05,0.1,0.0028,2026-01-02,abc,CPU,model | x,evaluate experiment matched-density --layers 2
s2o,0.5,2,0.0001,0.1,0.00001,2026-01-02,abc,CPU,model | x,evaluate experiment matched-density --layers 2
pbs,0.5,2,,,,2026-01-02,abc,CPU,model | x,evaluate experiment matched-density --layers 2
";

#[test]
fn errors_at_equal_density() {
    let site = Site::new(&[("docs/rows/a b/matched-density.csv", MATCHED)]);
    let (body, pictures) = site.made("error-by-density a b");
    assert_eq!(pictures, ["error-by-density.png", "error-by-density.svg"]);
    let expected = "
![Mean squared error by density, one line for each method](<rows/a b/error-by-density.png>)

Mean squared error and, behind it, relative L1 error; the lowest at each density is bold.

| method | density 0.25 | 0.5 |
| --- | --- | --- |
| s2o | **1.9e-3**, .0128 | **1.0e-4**, **1.0e-5** |
| pbs | 5.0e-2, **.0028** | - |

Rows: [matched-density.csv](<rows/a b/matched-density.csv>); commit abc; 2026-01-02; CPU; model \\| x; as vectors: \
[error-by-density.svg](<rows/a b/error-by-density.svg>); made by

```sh
cargo run --release --example evaluate -- experiment matched-density --layers 2
```

";
    assert_eq!(body, expected);
    let svg = site.read("docs/rows/a b/error-by-density.svg");
    assert!(["s2o", "pbs", "mean squared error"].iter().all(|label| svg.contains(&format!(">\n{label}\n</text>"))));
}

#[test]
fn a_sweep_is_interpolated() {
    let header = "method,option,value,layer,tokens,density,mse,mae,rel_l1,cosine,selection_seconds,attention_seconds";
    let sweep = format!(
        "{header}\ns2o,tau,0.1,0,99,0.15,0.01,0.01,0.01,1,0,0\ns2o,tau,0.01,0,99,0.25,0.0001,0.01,0.01,1,0,0\n"
    );
    let site = Site::new(&[("docs/rows/a/sweep.csv", &sweep)]);
    let (body, _) = site.made("error-by-density a");
    assert!(body.contains("| s2o | - | **1.0e-3**, **.0100** | - | - |"), "{body}");
    assert!(body.contains("\n\nRows: [sweep.csv](rows/a/sweep.csv); as vectors: "), "{body}");
}

#[test]
fn density_of_heads() {
    let heads = "method,layer,head,tokens,density,mse,rel_l1,commit,command\ns2o:tau=0.1,5,0,99,0.5,1,1,abc,evaluate experiment heads\n\
        s2o:tau=0.1,5,1,99,0.25,1,1,abc,evaluate experiment heads\ns2o:tau=0.1,0,1,99,1,1,1,abc,evaluate experiment heads\n\
        pbs,5,1,99,0.125,1,1,abc,evaluate experiment heads\n";
    let site = Site::new(&[("docs/rows/a/heads.csv", heads)]);
    let (body, pictures) = site.made("density-by-head a");
    let table = "\n| layer | s2o:tau=0.1 | pbs |\n| --- | --- | --- |\n| 0 | 1.000 | - |\n| 5 | .375 | .125 |\n\
        | all | .583 | .125 |\n";
    assert!(body.contains(table), "{body}");
    assert_eq!(pictures[..2], ["density-by-head-s2o-tau-0.1.png", "density-by-head-s2o-tau-0.1.svg"]);
    assert!(body.contains("![Density by layer and head: pbs](rows/a/density-by-head-pbs.png)\n"), "{body}");
}

/// A record of attention, prefills and methods.
fn record() -> String {
    let mut text = "date,commit,device,driver,bench,method,q_len,k_len,heads,kv_heads,head_dim,dtype,segment,tau,density,ms,tflops,\
        baseline,baseline_ms,ratio,command\n"
        .to_owned();
    let mut row = |commit: &str,
                   bench: &str,
                   method: &str,
                   tokens: usize,
                   density: &str,
                   [ms, base]: [f64; 2],
                   by: &str| {
        let base_ms = if by.is_empty() { String::new() } else { base.to_string() };
        let ratio = if by.is_empty() { String::new() } else { (base / ms).to_string() };
        text.push_str(&format!(
            "2026-01-02,{commit},GPU,580,{bench},\"{method}\",{tokens},{tokens},8,2,128,bf16,,,{density},{ms},,\"{by}\",{base_ms},\
             {ratio},\"cargo bench {bench}\"\n"
        ));
    };
    let flash = "candle-flash-attn 0.11.1";
    for (commit, ms) in [("old", 9.0), ("new", 2.0)] {
        row(commit, "attention gpu", "default, needle-7m layers", 8192, "0.5", [ms, 3.0], flash);
        row(commit, "attention gpu", "default, needle-7m layers", 8192, "0.5", [ms, 1.0], "PyTorch SDPA");
    }
    row("new", "attention gpu", "dense, needle-7m layers", 8192, "1.0", [1.5, 3.0], flash);
    row("new", "attention gpu", "default, needle-7m layers", 32768, "0.1234", [2.0, 41.0], flash);
    row("new", "attention gpu", "paper, random", 32768, "0.99999", [2.0, 4.0], flash);
    row("new", "attention gpu", "tau 0.05, random", 32768, "0.1", [1.0, 4.0], flash);
    for (method, ms) in
        [("s2o, m 32 layers calibrated weights", 5.0), ("s2o, paper's preset, m 32 layers calibrated weights", 8.0)]
    {
        row("pre", "prefill", method, 32768, "0.25", [ms, 20.0], "stock, candle-flash-attn 0.11.1");
        row("pre", "prefill", method, 32768, "0.25", [ms, 10.0], "dense");
    }
    for (method, [selection, attention]) in [("s2o", [1.0, 3.0]), ("xattention:threshold=0.95", [12.0, 5.5])] {
        let whole = selection + attention;
        for (phase, ms) in [("", whole), (", selection", selection), (", attention", attention)] {
            row("new", "methods", &format!("{method}{phase}"), 8190, "0.25", [ms, 8.0], flash);
        }
    }
    text
}

#[test]
fn speed_up_by_length() {
    let site = Site::new(&[("record/gpu/2026-01-02.csv", &record()), ("record/gpu/notes.txt", "no rows")]);
    let (body, pictures) = site.made("speed-up-by-length gpu");
    let names = ["speed-up-by-length", "time-to-first-token-by-length"];
    assert_eq!(pictures, names.map(|name| [format!("{name}.png"), format!("{name}.svg")]).concat());
    for part in [
        "](../record/gpu/speed-up-by-length.png)\n",
        "(bf16, 8 query and 2 KV heads of 128)",
        "| method | tensors | 8K | 32K |\n| --- | --- | --- | --- |\n| dense | needle-7m layers | 2.00 | - |\n\
         | S2O | needle-7m layers | 1.50 (.500) | 20.5 (.123) |\n| S2O paper | random | - | 2.00 |\n\n",
        "| method | model | 32K |\n| --- | --- | --- |\n| S2O | m 32 layers calibrated weights | 4.00 (.250) |\n\
         | S2O paper | m 32 layers calibrated weights | 2.50 (.250) |\n\n",
        "; commit new and pre; 2026-01-02; GPU; driver 580; ",
        "\n```sh\ncargo bench attention gpu\ncargo bench prefill\n```\n",
    ] {
        assert!(body.contains(part), "{part} in {body}");
    }
    let svg = site.read("record/gpu/speed-up-by-length.svg");
    assert!(svg.contains(">\nS2O, needle-7m\n</text>") && svg.contains(">\n32K\n</text>"));
}

#[test]
fn time_of_methods() {
    let site = Site::new(&[("record/gpu/2026-01-02.csv", &record())]);
    let (body, pictures) = site.made("methods-by-time gpu");
    let table = "| tokens | method | selection | of whole | of baseline | attention | whole | density | x baseline |\n\
        | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n\
        | 8190 | s2o | 1.00 | 25.0 % | 12.5 % | 3.00 | 4.00 | .250 | 2.00 |\n\
        | 8190 | xattention:threshold=0.95 | 12.0 | 68.6 % | 150 % | 5.50 | 17.5 | .250 | 0.46 |\n\
        | 8190 | candle-flash-attn 0.11.1 | - | - | - | - | 8.00 | - | 1 |\n";
    assert!(body.contains(table), "{body}");
    assert_eq!(pictures, ["methods-by-time-8190.png", "methods-by-time-8190.svg"]);

    let part = |line: &&str| !line.contains("\"s2o, attention\"");
    let record: Vec<String> = record().lines().filter(part).map(|line| format!("{line}\n")).collect();
    site.write("record/gpu/2026-01-02.csv", &record.concat());
    assert_eq!(
        site.refused("methods-by-time gpu"),
        "docs/page.md, line 2: methods-by-time gpu: record/gpu/2026-01-02.csv: expected a row `s2o, attention` at 8190 tokens \
         beside `s2o`, got none"
    );
}

fn outcome(method: &str, tokens: usize, depth: f64, chunk: &str, score: f64) -> Outcome {
    Outcome {
        key: Key { sample: format!("niah-{tokens}-{depth}"), method: method.into(), setting: setting(chunk) },
        digest: None,
        task: "niah".into(),
        groups: Vec::new(),
        context_tokens: tokens,
        depth: Some(depth),
        index: 0,
        seed: None,
        prompt_tokens: tokens,
        density: if method == "dense" { 1.0 } else { 0.125 },
        layer_density: Vec::new(),
        prefill_seconds: 1.0,
        finding: Finding::Answer { prediction: String::new(), references: Vec::new(), score },
    }
}

#[test]
fn needles_by_depth_and_length() {
    let site = Site::new(&[(
        "docs/rows/a/runs.csv",
        "outcomes,date,commit,device,source,command\n8,2026-01-02,abc,CPU,model m,evaluate run --tasks niah\n",
    )]);
    let mut journal = Journal::fresh(site.path("docs/rows/a/outcomes.jsonl")).expect("a journal");
    for (method, score) in [("dense", 1.0), ("s2o:tau=0.5", 0.0)] {
        for tokens in [4096, 8192] {
            journal.append(outcome(method, tokens, 0.0, "whole", 1.0)).expect("written");
            journal.append(outcome(method, tokens, 1.0, "whole", score)).expect("written");
        }
    }
    let all = journal.outcomes().to_vec();
    drop(journal);
    let (body, pictures) = site.made("niah a");
    let table = "Accuracy in percent with its 95 % interval, and density: m, f32, cpu, chat template none, chunk whole.\n\n\
        | task | context | items | dense | s2o:tau=0.5 |\n| --- | --- | --- | --- | --- |\n\
        | niah | 4096 | 2 | 100.0 (34.2 to 100.0), 1.000 | 50.0 (9.5 to 90.5), .125 |\n\
        | niah | 8192 | 2 | 100.0 (34.2 to 100.0), 1.000 | 50.0 (9.5 to 90.5), .125 |\n";
    assert!(body.contains(table), "{body}");
    assert!(body.contains("[runs.csv](rows/a/runs.csv); commit abc; 2026-01-02; CPU; model m; as vectors"), "{body}");
    assert!(body.contains("\ncargo run --release --example evaluate -- run --tasks niah\n"), "{body}");
    let names = ["depth-niah-dense", "depth-niah-s2o-tau-0.5"];
    assert_eq!(pictures, names.map(|name| [format!("{name}.png"), format!("{name}.svg")]).concat());
    let svg = site.read("docs/rows/a/depth-niah-s2o-tau-0.5.svg");
    assert!(
        ["niah: s2o:tau=0.5", "8K", "100 %", "0"].iter().all(|label| svg.contains(&format!(">\n{label}\n</text>")))
    );

    // The table alone says the same, without a picture.
    let table_there = site.path("docs/rows/b/table.csv");
    fs::create_dir_all(site.path("docs/rows/b")).expect("made");
    write_csv(&table_there, &rows(&all)).expect("written");
    let (body, pictures) = site.made("niah b");
    assert!(pictures.is_empty() && body.contains(table), "{body}");
}

#[test]
fn what_cannot_be_made_says_what_was_expected() {
    let site = Site::new(&[
        ("docs/rows/a/sweep.csv", "method,density\ns2o,half\n"),
        ("docs/rows/a/heads.csv", "method,layer,head,tokens,density,mse,rel_l1\n"),
        ("record/cpu/2026-01-02.csv", &record().replace("attention gpu", "attention")),
        ("record/empty/notes.txt", ""),
    ]);
    let kinds = "one of error-by-density, density-by-head, time-split, matched-speed, tau-and-segment, components, niah, \
                 speed-up-by-length, methods-by-time";
    for (name, expected) in [
        ("error-by-length a", &*format!("docs/page.md, line 2: expected {kinds}, got `error-by-length`")),
        ("niah", "docs/page.md, line 2: expected `niah` and a directory of docs/rows, got `niah`"),
        ("niah ../a", "docs/page.md, line 2: expected `niah` and a directory of docs/rows, got `niah ../a`"),
        ("niah /a", "docs/page.md, line 2: expected `niah` and a directory of docs/rows, got `niah /a`"),
        (
            "niah a",
            "docs/page.md, line 2: niah a: docs/rows/a: expected outcomes.jsonl or table.csv of `evaluate run`, got neither",
        ),
        (
            "error-by-density b",
            "docs/page.md, line 2: error-by-density b: docs/rows/b: expected matched-density.csv or sweep.csv of \
             `evaluate experiment matched-density`, got neither",
        ),
        (
            "error-by-density a",
            "docs/page.md, line 2: error-by-density a: docs/rows/a/sweep.csv, line 2: expected the columns method, value, layer, \
             density, mse, rel_l1, got ",
        ),
        (
            "density-by-head a",
            "docs/rows/a/heads.csv: expected rows with the columns method, layer, head, tokens, density, got none",
        ),
        ("density-by-head b", "docs/rows/b: expected heads.csv of `evaluate experiment heads`, got none"),
        (
            "speed-up-by-length cpu",
            "record/cpu: expected rows of the bench `attention gpu` against candle-flash-attn 0.11.1, got none among 18 rows",
        ),
        ("speed-up-by-length empty", "record/empty: expected CSV files of a benchmark's record, got none"),
        ("methods-by-time gpu", "record/gpu: expected CSV files of a benchmark's record, got no such directory"),
    ] {
        let error = site.refused(name);
        assert!(error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn a_page_out_of_date_is_noticed_and_left_alone() {
    let site = Site::new(&[("docs/rows/a/matched-density.csv", MATCHED)]);
    let stale = |site: &Site| match site.gallery().check() {
        Err(GalleryError::OutOfDate { stale }) => stale
            .iter()
            .map(|what| what.replace(&format!("{}/", site.directory.path().display()), ""))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let page = "<!-- gallery: error-by-density a -->\n<!-- /gallery -->\n";
    site.write("docs/page.md", page);
    let all = [
        "docs/page.md, line 1: error-by-density a",
        "docs/rows/a/error-by-density.svg",
        "docs/rows/a/error-by-density.png",
    ];
    assert_eq!(stale(&site), all);
    assert!(site.read("docs/page.md") == page && !site.path("docs/rows/a/error-by-density.svg").exists());

    site.gallery().update().expect("made");
    site.gallery().check().expect("up to date");
    site.write("docs/page.md", &format!("more\n{}", site.read("docs/page.md")));
    site.gallery().check().expect("what is hand-written is free");
    fs::remove_file(site.path("docs/rows/a/error-by-density.png")).expect("removed");
    assert_eq!(stale(&site), all[2..]);
    site.write("docs/rows/a/matched-density.csv", &MATCHED.replace("0.00191", "0.00291"));
    assert_eq!(stale(&site)[0], "docs/page.md, line 2: error-by-density a");
    assert_eq!(stale(&site)[1..], all[1..]);
}
