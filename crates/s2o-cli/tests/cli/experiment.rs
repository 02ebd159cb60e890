//! `evaluate experiment`: each experiment on a short prompt of the built-in model.

use serde_json::Value;
use tempfile::TempDir;

use crate::{assert_has, assert_misused, assert_refused, number, rows_of, stdout_of, text};

/// One layer, long enough for S2O.
const SHORT: [&str; 5] = ["--context", "2304", "--layers", "4", "--json"];

fn rows(experiment: &str, args: &[&str]) -> Vec<Value> {
    rows_of("evaluate", &[&["experiment", experiment], &SHORT[..], args].concat())
}

#[test]
fn matched_density_compares_methods_and_records_where_rows_come_from() {
    let directory = TempDir::new().expect("a temporary directory");
    let out = directory.path().join("rows");
    let args = ["--methods", "s2o,sliding-window", "--densities", "0.5,0.999", "--out", text(&out)];
    let matched = rows("matched-density", &args);
    assert_eq!(matched.len(), 4);
    let methods: Vec<&str> = matched.iter().filter_map(|row| row["method"].as_str()).collect();
    assert_eq!(methods, ["s2o", "sliding-window", "s2o", "sliding-window"]);
    assert!(number(&matched[0], "mse") < number(&matched[1], "mse"), "{matched:?}");
    assert!(matched[2..].iter().all(|row| row["mse"].is_null()), "beyond what was measured: {matched:?}");

    // A second run is appended, under the same header.
    rows("matched-density", &args);
    for (name, lines) in [("sweep", 1 + 2 * 15), ("matched-density", 1 + 2 * 4)] {
        let path = out.join(format!("{name}.csv"));
        let file = std::fs::read_to_string(&path).expect("rows");
        assert_eq!(file.lines().count(), lines, "{file}");
        let mut reader = csv::Reader::from_path(&path).expect("a CSV file");
        let header = reader.headers().expect("a header").clone();
        for record in reader.records().map(|record| record.expect("a record")) {
            let of = |column: &str| &record[header.iter().position(|name| name == column).expect("a column")];
            assert!(of("command").starts_with("evaluate experiment matched-density"), "{record:?}");
            assert!(of("source").contains("needle-11m") && of("device").contains("thread"), "{record:?}");
            assert!(of("date").len() == 10 && !of("method").is_empty(), "{record:?}");
        }
    }
    std::fs::write(out.join("sweep.csv"), "other,columns\n").expect("written");
    let before = [&["experiment", "matched-density"], &SHORT[..]].concat();
    assert_refused("evaluate", &before, &[(&args, "sweep.csv: expected the columns method,")]);
}

#[test]
fn time_split_tells_selection_from_attention() {
    let rows = rows("time-split", &["--methods", "dense,s2o,s2o:tau=0.1", "--repeat", "1"]);
    let methods: Vec<&str> = rows.iter().filter_map(|row| row["method"].as_str()).collect();
    assert_eq!(methods, ["dense", "s2o", "s2o:tau=0.1"]);
    assert_eq!((number(&rows[0], "density"), number(&rows[0], "selection_seconds")), (1.0, 0.0));
    assert!(number(&rows[1], "selection_seconds") > 0.0 && number(&rows[1], "mse") > 0.0);
    assert!(number(&rows[2], "density") < number(&rows[1], "density"), "{rows:?}");
    assert!(rows.iter().all(|row| row["layer"] == 4 && number(row, "tokens") > 2200.0));
}

#[test]
fn the_tables_of_the_paper_have_their_rows() {
    let speed = rows("matched-speed", &["--repeat", "1"]);
    assert!(speed.len() > 4, "{speed:?}");
    for row in &speed {
        assert!((number(row, "density") - number(row, "block_density")).abs() < 0.02, "{row}");
        assert!(number(row, "block_seconds") > 0.0 && number(row, "ratio") > 0.0, "{row}");
    }
    let grid = rows("tau-and-segment", &["--taus", "0.005,0.05", "--segments", "256,512", "--repeat", "1"]);
    assert_eq!(grid.len(), 4);
    assert!(number(&grid[1], "density") < number(&grid[0], "density"), "{grid:?}");
    let components = rows("components", &["--repeat", "1"]);
    assert_eq!(components.len(), 12);
    assert!(number(&components[6], "mse") > number(&components[7], "mse"), "{components:?}");
    let heads = rows("heads", &["--methods", "s2o,s2o-paper"]);
    assert_eq!(heads.len(), 2 * 4);
    assert!(heads.iter().all(|row| (0.0..=1.0).contains(&number(row, "density"))), "{heads:?}");
}

#[test]
fn tables_are_for_people() {
    let table = stdout_of("evaluate", &["experiment", "heads", "--context", "2304", "--layers", "4"]);
    assert_has(&table, &["needle-11m", "passkey at depth 0.5", "method", "density", "rel_l1", "s2o", "thread"]);
}

#[test]
fn what_cannot_be_is_refused() {
    let cases: &[(&[&str], &str)] = &[
        (&["matched-density", "--densities", "0.5,1.5"], "expected numbers above 0 and below 1, got 1.5"),
        (&["matched-density", "--densities", "-1"], "--densities: expected numbers above 0 and below 1, got -1"),
        (&["time-split", "--methods", "s2o:tau=2"], "tau: expected a number in [0, 1), got 2"),
        (&["tau-and-segment", "--segments", "100"], "segment: expected a positive multiple of tile-q = 128"),
        (&["matched-speed", "--method", "sliding-window:window=0"], "expected at least 1 token, got 0"),
        (&["heads", "--layers", "10", "--context", "100"], "error: --layers: expected layers 0 to 9, got 10"),
        (&["components", "--tensors", "no-such-file"], "cannot read no-such-file"),
    ];
    assert_refused("evaluate", &["experiment"], cases);
    let heads = ["experiment", "heads", "--methods", "magic"];
    assert_misused("evaluate", &[&["experiment"], &["experiment", "magic"], &heads]);
}
