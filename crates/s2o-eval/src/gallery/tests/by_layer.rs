//! Entries whose rows are about one layer each.

use super::*;

const ORIGIN: &str = "2026-01-02,abc,CPU,model m,evaluate experiment";

/// A file of rows with where they come from; a row may name another commit behind a `@`.
fn csv(columns: &str, rows: &[&str]) -> String {
    let line = |row: &&str| {
        let (row, commit) = row.split_once('@').unwrap_or((row, "abc"));
        format!("{row},{}\n", ORIGIN.replace("abc", commit))
    };
    format!("{columns},date,commit,device,source,command\n{}", rows.iter().map(line).collect::<String>())
}

const TIME: &str = "method,layer,tokens,selection_seconds,attention_seconds,dense_seconds,speed_up,density,mse,rel_l1";

#[test]
fn time_of_phases() {
    let rows = [
        "s2o,0,8190,9,9,9,9,0.9,9,9@old",
        "s2o,0,8190,0.01,0.09,0.3,3,0.4,0.002,0.02",
        "s2o,2,8190,0.03,0.07,0.5,5,0.2,0.004,0.04",
        "xattention:threshold=0.95,0,8190,0.1,0.1,0.3,1.5,0.5,0.00001,0.001",
        "xattention:threshold=0.95,2,8190,0.1,0.3,0.5,1.25,0.5,0.00003,0.002",
        "s2o,2,16384,0.03,1.07,5,4.5,0.1,0.004,0.04",
        "dense,2,16384,0,5.1,5,0.98,1,0,0",
    ];
    let site = Site::new(&[("docs/rows/a/time-split.csv", &csv(TIME, &rows))]);
    let (body, pictures) = site.made("time-split a");
    let names = ["time-split-8190", "time-split-16384"];
    assert_eq!(pictures, names.map(|name| [format!("{name}.png"), format!("{name}.svg")]).concat());
    let header = "| method | selection | attention | whole | density | MSE | relative L1 | speed-up |\n\
        | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for part in [
        "\n8190 tokens, layers 0 and 2:\n\n",
        header,
        "| s2o | 20.0 | 80.0 | 100 | .300 | 3.0e-3 | .0300 | 4.00 |\n\
         | xattention:threshold=0.95 | 100 | 200 | 300 | .500 | 2.0e-5 | .0015 | 1.33 |\n\
         | dense | - | - | 400 | 1.000 | - | - | 1 |\n",
        "\n16384 tokens, layer 2:\n\n",
        "| s2o | 30.0 | 1070 | 1100 | .100 | 4.0e-3 | .0400 | 4.55 |\n\
         | dense | 0.00 | 5100 | 5100 | 1.000 | 0.0e0 | .0000 | 0.98 |\n\n",
        "Rows: [time-split.csv](rows/a/time-split.csv); commit abc; 2026-01-02; CPU; model m; as vectors: ",
        "\ncargo run --release --example evaluate -- experiment\n",
    ] {
        assert!(body.contains(part), "{part} in {body}");
    }
    let svg = site.read("docs/rows/a/time-split-8190.svg");
    let labels = ["8190 tokens", "xattention:threshold=0.95", "dense", "selection", "attention", "400.0"];
    assert!(labels.iter().all(|label| svg.contains(&format!(">\n{label}\n</text>"))), "{svg}");
}

const SPEED: &str =
    "method,value,layer,tokens,density,block_density,seconds,selection_seconds,block_seconds,dense_seconds,ratio";

#[test]
fn speed_against_random_blocks() {
    let rows = [
        "s2o,0.01,4,8192,0.5,0.501,0.2,0.01,0.3,0.6,1.5",
        "s2o,0.1,4,8192,0.25,0.25,0.1,0.01,0.11,0.6,1.1",
        "sliding-window,,4,8192,0.125,0.125,0.05,0.0001,0.05,0.6,1",
    ];
    let site = Site::new(&[("docs/rows/a/matched-speed.csv", &csv(SPEED, &rows))]);
    let (body, pictures) = site.made("matched-speed a");
    let names = ["matched-speed-s2o-8192", "matched-speed-sliding-window-8192"];
    assert_eq!(pictures, names.map(|name| [format!("{name}.png"), format!("{name}.svg")]).concat());
    for part in [
        "\ns2o, 8192 tokens, layer 4:\n\n\
         | tau | density | of the blocks | selection | whole | random blocks | dense | ratio | speed-up |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n\
         | 0.1 | .250 | .250 | 10.0 | 100 | 110 | 600 | 1.10 | 6.00 |\n\
         | 0.01 | .500 | .501 | 10.0 | 200 | 300 | 600 | 1.50 | 3.00 |\n",
        "\nsliding-window, 8192 tokens, layer 4:\n\n| window | density |",
        "\n| - | .125 | .125 | 0.10 | 50.0 | 50.0 | 600 | 1.00 | 12.0 |\n",
    ] {
        assert!(body.contains(part), "{part} in {body}");
    }
    let svg = site.read("docs/rows/a/matched-speed-s2o-8192.svg");
    let labels = ["s2o, 8K tokens", "s2o", "random blocks", "dense", "density", "milliseconds"];
    assert!(labels.iter().all(|label| svg.contains(&format!(">\n{label}\n</text>"))), "{svg}");
}

const GRID: &str =
    "method,tau,segment,layer,tokens,density,mse,rel_l1,selection_seconds,attention_seconds,dense_seconds,speed_up";

#[test]
fn thresholds_by_segment_lengths() {
    let rows = [
        "s2o,0.05,512,0,8190,0.2,0.1,0.02,0.1,0.1,0.8,4",
        "s2o,0.05,512,1,8190,0.4,0.1,0.04,0.1,0.3,1,2.5",
        "s2o,0.005,512,0,8190,1,0.1,0.0000001,0.1,0.7,0.8,1",
        "s2o,0.005,512,1,8190,1,0.1,0.0000001,0.1,0.7,0.8,1",
        "s2o,0.05,1024,0,8190,0.5,0.1,0.01,0.1,0.3,0.8,2",
        "s2o,0.05,1024,1,8190,0.5,0.1,0.01,0.1,0.3,0.8,2",
    ];
    let site = Site::new(&[
        ("docs/rows/a/tau-and-segment.csv", &csv(GRID, &rows)),
        ("docs/rows/dense/tau-and-segment.csv", &csv(GRID, &rows[2..4])),
    ]);
    let (body, pictures) = site.made("tau-and-segment a");
    assert_eq!(pictures, ["tau-and-segment-s2o-8190.png", "tau-and-segment-s2o-8190.svg"]);
    let table = "\ns2o, 8190 tokens, layers 0 and 1:\n\n| tau | segment 512 | 1024 |\n| --- | --- | --- |\n\
        | 0.005 | 1.000, 1.0e-7, 1.00x | - |\n| 0.05 | .300, .0300, 3.00x | .500, .0100, 2.00x |\n";
    assert!(body.contains(table), "{body}");
    let svg = site.read("docs/rows/a/tau-and-segment-s2o-8190.svg");
    let labels = ["s2o, 8190 tokens", "segment 512", "segment 1024", "relative L1 error"];
    assert!(labels.iter().all(|label| svg.contains(&format!(">\n{label}\n</text>"))), "{svg}");

    let (body, pictures) = site.made("tau-and-segment dense");
    assert!(pictures.is_empty() && body.contains("| 0.005 | 1.000, 1.0e-7, 1.00x |\n"), "{body}");
}

const COMPONENTS: &str = "settings,component,dense_tail,layer,tokens,density,mse,mae,rel_l1,cosine,selection_seconds,\
    attention_seconds,dense_seconds,speed_up";

#[test]
fn parts_of_s2o() {
    let rows = [
        "s2o-paper,local window only,0,0,8190,0.125,0.5,0.1,0.25,0.9,0,0.1,0.8,8",
        "s2o-paper,keys ranked,0,0,8190,0.25,0.05,0.1,0.05,0.9,0.1,0.1,0.8,4",
        "s2o,keys and queries ranked,128,0,8190,0.5,0.005,0.1,0.01,0.9,0.1,0.3,0.8,2",
    ];
    let site = Site::new(&[("docs/rows/a/components.csv", &csv(COMPONENTS, &rows))]);
    let (body, pictures) = site.made("components a");
    assert!(pictures.is_empty());
    let table = "\n8190 tokens, layer 0:\n\n\
        | settings | dense tail | component | density | MSE | relative L1 | speed-up |\n\
        | --- | --- | --- | --- | --- | --- | --- |\n\
        | s2o-paper | 0 | local window only | .125 | 5.0e-1 | .2500 | 8.00 |\n\
        | s2o-paper | 0 | keys ranked | .250 | 5.0e-2 | .0500 | 4.00 |\n\
        | s2o | 128 | keys and queries ranked | .500 | 5.0e-3 | .0100 | 2.00 |\n\n\
        Rows: [components.csv](rows/a/components.csv); commit abc;";
    assert!(body.contains(table), "{body}");
}

#[test]
fn what_is_missing_is_named() {
    let no_dense = GRID.strip_suffix(",dense_seconds,speed_up").expect("columns");
    let site = Site::new(&[
        ("docs/rows/a/time-split.csv", &csv(TIME, &[])),
        (
            "docs/rows/a/matched-speed.csv",
            &csv(SPEED, &["s2o,0.1,0,99,1,1,1,1,1,1,1", "s2o,0.1,2,99,1,1,1,1,1,1,1", "s2o,0.2,0,99,1,1,1,1,1,1,1"]),
        ),
        ("docs/rows/a/tau-and-segment.csv", &csv(no_dense, &["s2o,0.1,512,0,99,1,1,1,1,1"])),
        ("docs/rows/a/components.csv", &csv(COMPONENTS, &["s2o,keys ranked,all,0,99,1,1,1,1,1,1,1,1,1"])),
    ]);
    for (name, expected) in [
        (
            "time-split a",
            "docs/rows/a/time-split.csv: expected rows with the columns method, layer, tokens, selection_seconds",
        ),
        ("time-split b", "docs/rows/b: expected time-split.csv of `evaluate experiment time-split`, got none"),
        (
            "matched-speed a",
            "docs/rows/a/matched-speed.csv: expected layers 0 and 2 of `s2o` with tau 0.2 at 99 tokens, as of the first, got \
             layer 0",
        ),
        ("matched-speed b", "docs/rows/b: expected matched-speed.csv of `evaluate experiment matched-speed`, got none"),
        (
            "tau-and-segment a",
            "docs/rows/a/tau-and-segment.csv, line 2: expected the columns method, tau, segment, layer, tokens, density, mse, \
             rel_l1, selection_seconds, attention_seconds, dense_seconds, speed_up, got missing field `dense_seconds`",
        ),
        (
            "tau-and-segment b",
            "docs/rows/b: expected tau-and-segment.csv of `evaluate experiment tau-and-segment`, got none",
        ),
        ("components a", "docs/rows/a/components.csv, line 2: expected the columns settings, component, dense_tail"),
        ("components b", "docs/rows/b: expected components.csv of `evaluate experiment components`, got none"),
    ] {
        let error = site.refused(name);
        assert!(error.contains(expected), "{name}: {error}");
    }
}
