//! Every kind of entry on small rows, and pages with entries. This repository's pages must have every kind.

use std::fs;

use s2o_eval::report::{rows, write_csv};
use s2o_eval::run::read_outcomes;
use tempfile::TempDir;

use super::*;

/// A temporary directory with a page and rows.
struct Site(TempDir);

impl Site {
    fn new(files: &[(&str, &str)]) -> Self {
        let site = Self(TempDir::new().expect("a directory"));
        files.iter().for_each(|(name, text)| site.write(name, text));
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
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
        let [page, rows, record] = ["docs/page.md", "docs/rows", "record"].map(|name| self.path(name));
        Gallery { page, rows, record }
    }

    /// Renders an entry, checks that it has these pictures and these `parts`, and returns its content.
    fn shows(&self, name: &str, pictures: &[&str], parts: &[&str]) -> String {
        self.write("docs/page.md", &format!("before\n<!-- gallery: {name} -->\n<!-- /gallery -->\nafter\n"));
        let entries = self.gallery().update().unwrap_or_else(|error| panic!("{error:#}"));
        let [Entry { section, body, .. }] = entries.as_slice() else { panic!("{} entries", entries.len()) };
        let files = section.pictures.iter().flat_map(|picture| section.files(picture));
        assert!(files.into_iter().all(|path| fs::metadata(path).is_ok_and(|file| file.len() > 500)));
        self.gallery().check().expect("up to date");
        let page = format!("before\n<!-- gallery: {name} -->\n{body}<!-- /gallery -->\nafter\n");
        assert_eq!(self.read("docs/page.md"), page);
        let names: Vec<&str> = section.pictures.iter().map(|picture| picture.name.as_str()).collect();
        assert_eq!(names, pictures);
        for part in parts {
            assert!(body.contains(part), "{part} in {body}");
        }
        body.clone()
    }

    /// The error of a gallery, without the directory's path.
    fn error(&self, result: Result<Vec<Entry>>) -> String {
        let error = result.err().expect("an error");
        format!("{error:#}").replace(&format!("{}/", self.0.path().display()), "")
    }

    /// The reason why an entry cannot be made.
    fn refused(&self, name: &str) -> String {
        self.write("docs/page.md", &format!("before\n<!-- gallery: {name} -->\n<!-- /gallery -->\n"));
        self.error(self.gallery().update())
    }
}

#[test]
fn the_pages_of_this_repository_are_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut entries = Vec::new();
    for page in PAGES {
        let [page, rows, record] = [page, "docs/results", "benches/record"].map(|name| root.join(name));
        entries.extend(Gallery { page, rows, record }.check().unwrap_or_else(|error| panic!("{error:#}")));
    }
    for Kind { name, .. } in KINDS {
        let is_one = |entry: &Entry| entry.block.name.starts_with(name);
        assert!(entries.iter().any(is_one), "no entry is an example of {name}");
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
    let body = site.shows("error-by-density a b", &["error-by-density"], &[]);
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
cargo run --release evaluate experiment matched-density --layers 2
```

";
    assert_eq!(body, expected);
}

#[test]
fn a_sweep_is_interpolated() {
    let header = "method,option,value,layer,tokens,density,mse,mae,rel_l1,cosine,selection_seconds,attention_seconds";
    let sweep = format!(
        "{header}\ns2o,tau,0.1,0,99,0.15,0.01,0.01,0.01,1,0,0\ns2o,tau,0.01,0,99,0.25,0.0001,0.01,0.01,1,0,0\n"
    );
    let parts =
        ["| s2o | - | **1.0e-3**, **.0100** | - | - |", "\n\nRows: [sweep.csv](rows/a/sweep.csv); as vectors: "];
    let site = Site::new(&[("docs/rows/a/sweep.csv", &sweep)]);
    site.shows("error-by-density a", &["error-by-density"], &parts);
}

#[test]
fn heads_without_rows_are_left_out() {
    let heads = "method,layer,head,tokens,density,mse,rel_l1,commit,command\ns2o:tau=0.1,5,0,99,0.5,1,1,abc,c\n\
        s2o:tau=0.1,5,1,99,0.25,1,1,abc,c\ns2o:tau=0.1,0,1,99,1,1,1,abc,c\npbs,5,1,99,0.125,1,1,abc,c\n";
    let table = "\n| layer | s2o:tau=0.1 | pbs |\n| --- | --- | --- |\n| 0 | 1.000 | - |\n| 5 | .375 | .125 |\n\
        | all | .583 | .125 |\n";
    let pictures = ["density-by-head-s2o-tau-0.1", "density-by-head-pbs"];
    Site::new(&[("docs/rows/a/heads.csv", heads)]).shows("density-by-head a", &pictures, &[table]);
}

const TIME: &str = "method,layer,tokens,selection_seconds,attention_seconds,dense_seconds,speed_up,density,mse,rel_l1";

#[test]
fn dense_attention_is_a_line_of_its_own_unless_it_is_a_method() {
    // Of a run that was repeated, and of a row that was, the last counts.
    let rows = "s2o,2,16384,0.03,1.07,5,4.5,0.1,0.004,0.04,abc\ndense,2,16384,0,5.1,5,0.98,1,0,0,abc\n\
        s2o,0,8190,9,9,9,9,0.9,9,9,old\ns2o,2,8190,8,8,8,8,0.8,8,8,abc\n\
        s2o,0,8190,0.01,0.09,0.3,3,0.4,0.002,0.02,abc\ns2o,2,8190,0.03,0.07,0.5,5,0.2,0.004,0.04,abc\n";
    let site = Site::new(&[("docs/rows/a/time-split.csv", &format!("{TIME},commit\n{rows}"))]);
    let parts = [
        "\n8190 tokens, layers 0 and 2:\n\n",
        "| s2o | 20.0 | 80.0 | 100 | .300 | 3.0e-3 | .0300 | 4.00 |\n| dense | - | - | 400 | 1.000 | - | - | 1 |\n",
        "| s2o | 30.0 | 1070 | 1100 | .100 | 4.0e-3 | .0400 | 4.55 |\n\
         | dense | 0.00 | 5100 | 5100 | 1.000 | 0.0e0 | .0000 | 0.98 |\n\n",
    ];
    site.shows("time-split a", &["time-split-8190", "time-split-16384"], &parts);
    assert!(site.read("docs/rows/a/time-split-8190.svg").contains(">400.0</text>"));
}

const SPEED: &str =
    "method,value,layer,tokens,density,block_density,seconds,selection_seconds,block_seconds,dense_seconds,ratio";

#[test]
fn speeds_are_sorted_by_density_and_need_no_option() {
    let rows = "s2o,0.01,4,8192,0.5,0.501,0.2,0.01,0.3,0.6,1.5\ns2o,0.1,4,8192,0.25,0.25,0.1,0.01,0.11,0.6,1.1\n\
        sliding-window,,4,8192,0.125,0.125,0.05,0.0001,0.05,0.6,1\n";
    let site = Site::new(&[("docs/rows/a/matched-speed.csv", &format!("{SPEED}\n{rows}"))]);
    let parts = [
        "\n| 0.1 | .250 | .250 | 10.0 | 100 | 110 | 600 | 1.10 | 6.00 |\n\
         | 0.01 | .500 | .501 | 10.0 | 200 | 300 | 600 | 1.50 | 3.00 |\n",
        "\nsliding-window, 8192 tokens, layer 4:\n\n| window | density |",
        "\n| - | .125 | .125 | 0.10 | 50.0 | 50.0 | 600 | 1.00 | 12.0 |\n",
    ];
    site.shows("matched-speed a", &["matched-speed-s2o-8192", "matched-speed-sliding-window-8192"], &parts);
}

const GRID: &str =
    "method,tau,segment,layer,tokens,density,mse,rel_l1,selection_seconds,attention_seconds,dense_seconds,speed_up";

#[test]
fn a_grid_of_thresholds_may_have_gaps_and_may_skip_nothing() {
    let dense = "s2o,0.005,512,0,8190,1,0.1,0.0000001,0.1,0.7,0.8,1\n";
    let sparse = "s2o,0.05,512,0,8190,0.2,0.1,0.02,0.1,0.1,0.8,4\ns2o,0.05,1024,0,8190,0.5,0.1,0.01,0.1,0.3,0.8,2\n";
    let site = Site::new(&[
        ("docs/rows/a/tau-and-segment.csv", &format!("{GRID}\n{sparse}{dense}")),
        ("docs/rows/dense/tau-and-segment.csv", &format!("{GRID}\n{dense}")),
    ]);
    let table = "\n| tau | segment 512 | 1024 |\n| --- | --- | --- |\n| 0.005 | 1.000, 1.0e-7, 1.00x | - |\n\
        | 0.05 | .200, .0200, 4.00x | .500, .0100, 2.00x |\n";
    site.shows("tau-and-segment a", &["tau-and-segment-s2o-8190"], &[table]);
    site.shows("tau-and-segment dense", &[], &["| 0.005 | 1.000, 1.0e-7, 1.00x |\n"]);
}

/// A record of attention and methods.
fn record() -> String {
    let flash = "candle-flash-attn 0.11.1";
    let columns =
        "commit,bench,method,q_len,k_len,heads,kv_heads,head_dim,dtype,density,error,ms,baseline,baseline_ms,ratio";
    let mut text = format!("{columns}\n");
    let mut row = |commit, bench, method, tokens, density, [ms, base]: [f64; 2], baseline| {
        let ratio = base / ms;
        let shape = format!("{tokens},{tokens},8,2,128,bf16");
        let error = if density < 0.9 { "0.03" } else { "" };
        text.push_str(&format!(
            "{commit},{bench},\"{method}\",{shape},{density},{error},{ms},\"{baseline}\",{base},{ratio}\n"
        ));
    };
    for (commit, ms) in [("old", 9.0), ("new", 2.0)] {
        row(commit, "attention gpu", "default, needle-7m layers", 8192, 0.5, [ms, 3.0], flash);
        row(commit, "attention gpu", "default, needle-7m layers", 8192, 0.5, [ms, 1.0], "PyTorch SDPA");
    }
    row("new", "attention gpu", "paper, random", 32768, 0.99999, [2.0, 4.0], flash);
    row("new", "attention gpu", "tau 0.05, random", 32768, 0.1, [1.0, 4.0], flash);
    for (method, ms) in [("s2o", 4.0), ("s2o, selection", 1.0), ("s2o, attention", 3.0)] {
        row("new", "methods", method, 8190, 0.25, [ms, 8.0], flash);
    }
    text
}

/// Two settings of a method.
fn sweep() -> String {
    let mut text =
        "commit,bench,method,q_len,k_len,heads,kv_heads,head_dim,dtype,density,error,error_by_head,ms,baseline,\
                    baseline_ms,ratio\n"
            .to_owned();
    for (tau, error, ms) in [(0.1, 0.15, 1.0), (0.02, 0.05, 4.0)] {
        for phase in ["", ", selection"] {
            let by_head = 2.0 * error;
            text.push_str(&format!(
                "new,methods sweep,\"s2o:tau={tau}{phase}\",8192,8192,8,2,128,bf16,0.5,{error},{by_head},{ms},\
                 flash,8,{}\n",
                8.0 / ms
            ));
        }
    }
    text
}

#[test]
fn a_record_is_shown_by_its_newest_rows() {
    let site = Site::new(&[("record/gpu/2026-01-02.csv", &record()), ("record/gpu/notes.txt", "no rows")]);
    let table = "| method | tensors | 8K | 32K |\n| --- | --- | --- | --- |\n\
        | S2O | needle-7m layers | 1.50 (.500, error .030) | - |\n| S2O paper | random | - | 2.00 |\n\n";
    // Nothing is there of prefills.
    site.shows("speed-up-by-length gpu", &["speed-up-by-length"], &[table, "; commit new;"]);
    let table = "\n| 8190 | s2o | 1.00 | 25.0 % | 12.5 % | 3.00 | 4.00 | .250 | .030 | 2.00 |\n\
        | 8190 | candle-flash-attn 0.11.1 | - | - | - | - | 8.00 | - | - | 1 |\n";
    site.shows("methods-by-time gpu", &["methods-by-time-8190"], &[table]);
    site.write("record/gpu/2026-01-02.csv", &record().replace("s2o, attention", "pbs, attention"));
    let expected = "2026-01-02.csv: expected a row `s2o, attention` at 8190 tokens beside `s2o`, got none";
    assert!(site.refused("methods-by-time gpu").ends_with(expected));
}

#[test]
fn methods_are_compared_at_equal_error() {
    let site = Site::new(&[("record/gpu/2026-01-02.csv", &sweep())]);
    let table = "| tokens | method | error 0.02 | 0.05 | 0.1 | 0.15 |\n| --- | --- | --- | --- | --- | --- |\n";
    let whole = format!("{table}| 8K | s2o | - | 2.00 | 4.00 | 8.00 |\n");
    let by_head = format!("{table}| 8K | s2o | - | - | 2.00 | 2.83 |\n");
    site.shows("time-by-error gpu", &["time-by-error-8192"], &[&whole, &by_head]);
}

#[test]
fn needles_are_shown_by_depth_or_from_a_table_alone() {
    let mut outcomes = "{\"format\":\"s2o-eval outcomes\",\"version\":1}\n".to_owned();
    for (method, depth, score, prediction) in [
        ("dense", 0, 1, "x"),
        ("dense", 1, 1, "x"),
        ("s2o:tau=0.5", 0, 1, "is x"),
        ("s2o:tau=0.5", 1, 0, ""),
        ("s2o:tau=0.5@0.2", 0, 1, "x"),
        ("s2o:tau=0.5@0.2", 1, 1, "x"),
    ] {
        outcomes.push_str(&format!(
            r#"{{"sample":"niah-{depth}","method":"{method}","model":"m","dtype":"f32","device":"cpu","template":"none",
            "chunk":"whole","digest":null,"task":"niah","groups":[],"context_tokens":4096,"depth":{depth}.0,"index":0,
            "seed":null,"prompt_tokens":4096,"density":0.125,"layer_density":[],"prefill_seconds":1.0,"kind":"answer",
            "prediction":"{prediction}","references":["x"],"score":{score}.0}}"#
        ).replace('\n', ""));
        outcomes.push('\n');
    }
    let site = Site::new(&[
        ("docs/rows/a/runs.csv", "outcomes,commit,command\n4,abc,evaluate run --tasks niah\n"),
        ("docs/rows/a/outcomes.jsonl", &outcomes),
        ("docs/rows/b/runs.csv", "outcomes\n4\n"),
    ]);
    let table = "m, f32, cpu, chat template none, chunk whole.\n\n\
        Mean score, in percent of the references that the answer contains:\n\n\
        | method | 4K |\n| --- | --- |\n| dense | 100.0 |\n| s2o:tau=0.5 | 50.0 |\n\n\
        The same with 0 for answers that do not begin right:\n\n\
        | method | 4K |\n| --- | --- |\n| dense | 100.0 |\n| s2o:tau=0.5 | 0.0 |\n\n\
        Density:\n\n\
        | method | 4K |\n| --- | --- |\n| dense | .125 |\n| s2o:tau=0.5 | .125 |\n\n\
        Mean score, in percent of the references that the answer contains at density 0.2:\n\n\
        | method | 4K |\n| --- | --- |\n| s2o:tau=0.5 | 100.0 |\n";
    let parts = [table, "[runs.csv](rows/a/runs.csv); commit abc; as vectors"];
    let pictures = ["depth-niah-dense", "depth-niah-s2o-tau-0.5", "depth-niah-s2o-tau-0.5-0.2"];
    site.shows("niah a", &pictures, &parts);

    let all = read_outcomes(site.path("docs/rows/a/outcomes.jsonl")).expect("outcomes");
    write_csv(&site.path("docs/rows/b/table.csv"), &rows(&all)).expect("written");
    site.shows("niah b", &[], &[table]);
}

#[test]
fn entries_that_cannot_be_made_say_what_was_expected() {
    let speed = [("0.1", 0), ("0.1", 5), ("0.1", 2), ("0.2", 0), ("0.2", 2)]
        .map(|(value, layer)| format!("s2o,{value},{layer},99,1,1,1,1,1,1,1\n"))
        .concat();
    let site = Site::new(&[
        ("docs/rows/a/sweep.csv", "method,density\ns2o,half\n"),
        ("docs/rows/a/heads.csv", "method,layer,head,tokens,density,mse,rel_l1\n"),
        ("docs/rows/a/matched-speed.csv", &format!("{SPEED}\n{speed}")),
        ("docs/rows/a/tau-and-segment.csv", "method,tau\ns2o,0.1\n"),
        ("record/cpu/2026-01-02.csv", &record().replace("attention gpu", "attention")),
        ("record/empty/notes.txt", ""),
    ]);
    let kinds = KINDS.map(|kind| kind.name).join(", ");
    for (name, expected) in [
        ("magic a", format!("docs/page.md, line 2: expected one of {kinds}, got `magic`").as_str()),
        ("niah", "docs/page.md, line 2: expected `niah` and a directory of docs/rows, got `niah`"),
        ("niah ../a", "docs/page.md, line 2: expected `niah` and a directory of docs/rows, got `niah ../a`"),
        (
            "niah a",
            "docs/page.md, line 2: niah a: docs/rows/a: expected outcomes.jsonl or table.csv of `evaluate run`, got ",
        ),
        (
            "error-by-density b",
            "docs/rows/b: expected matched-density.csv or sweep.csv of `evaluate experiment matched-density`",
        ),
        ("error-by-density a", "docs/rows/a/sweep.csv, line 2: expected the columns method, value"),
        ("density-by-head a", "heads.csv: expected rows with the columns method, layer, head"),
        ("density-by-head b", "docs/rows/b: expected heads.csv of `evaluate experiment heads`, got none"),
        (
            "matched-speed a",
            "docs/rows/a/matched-speed.csv: expected layers 0, 2 and 5 of `s2o` with tau 0.2 at 99 tokens, as of \
             the first, got layers 0 and 2",
        ),
        ("tau-and-segment a", "line 2: expected the columns method, tau, segment, layer, tokens, density, mse, rel_l1"),
        ("components b", "docs/rows/b: expected components.csv of `evaluate experiment components`, got none"),
        (
            "speed-up-by-length cpu",
            "record/cpu: expected rows of the bench `attention gpu` against candle-flash-attn 0.11.1, got none",
        ),
        ("speed-up-by-length empty", "record/empty: expected CSV files of a benchmark's record, got none"),
        ("methods-by-time gpu", "record/gpu: expected CSV files of a benchmark's record, got no such directory"),
    ] {
        let error = site.refused(name);
        assert!(error.contains(expected), "{name}: {error}");
    }
    fs::remove_file(site.path("docs/page.md")).expect("removed");
    assert!(site.error(site.gallery().check()).starts_with("cannot read docs/page.md: "));
}

#[test]
fn a_page_out_of_date_is_noticed_and_left_alone() {
    let site = Site::new(&[("docs/rows/a/matched-density.csv", MATCHED)]);
    let page = "<!-- gallery: error-by-density a -->\n<!-- /gallery -->\n";
    site.write("docs/page.md", page);
    let (picture, stale) = ("docs/rows/a/error-by-density", "expected the output of `gallery`, got something else in ");
    let error = site.error(site.gallery().check());
    assert_eq!(error, format!("{stale}docs/page.md, line 1: error-by-density a; {picture}.svg; {picture}.png"));
    assert!(site.read("docs/page.md") == page && !site.path(&format!("{picture}.svg")).exists());

    site.gallery().update().expect("made");
    site.gallery().check().expect("up to date");
    site.write("docs/page.md", &format!("more\n{}", site.read("docs/page.md")));
    site.gallery().check().expect("hand-written lines are free");
    fs::remove_file(site.path(&format!("{picture}.png"))).expect("removed");
    assert_eq!(site.error(site.gallery().check()), format!("{stale}{picture}.png"));
    site.write("docs/rows/a/matched-density.csv", &MATCHED.replace("0.00191", "0.00291"));
    let stale = format!("{stale}docs/page.md, line 2: error-by-density a; ");
    assert!(site.error(site.gallery().check()).starts_with(&stale));
}
