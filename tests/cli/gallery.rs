//! `evaluate gallery`: a page from rows that `evaluate experiment` wrote.

use std::fs;

use tempfile::TempDir;

use crate::{error_of, stdout_of, text};

#[test]
fn a_page_is_made_from_the_rows_of_experiments() {
    let directory = TempDir::new().expect("a directory");
    let rows = directory.path().join("rows");
    let out = rows.join("small");
    let layer = ["--context", "2304", "--layers", "4", "--out", text(&out)];
    stdout_of("evaluate", &[&["experiment", "heads", "--methods", "s2o,s2o-paper"], &layer[..]].concat());
    let matched = ["experiment", "matched-density", "--methods", "s2o,sliding-window", "--densities", "0.5,0.6"];
    stdout_of("evaluate", &[&matched, &layer[..]].concat());

    let page = directory.path().join("page.md");
    let entries = ["error-by-density small", "density-by-head small"];
    let blocks = entries.map(|name| format!("<!-- gallery: {name} -->\n<!-- /gallery -->\n"));
    fs::write(&page, format!("# Mine\n\n{}\nMine too.\n", blocks.join("\n"))).expect("written");
    let gallery = ["gallery", "--page", text(&page), "--rows", text(&rows), "--record", text(&rows)];
    let check = [&gallery[..], &["--check"]].concat();

    let error = error_of("evaluate", &check);
    assert!(error.contains("expected what `evaluate gallery` makes, got something else in "), "{error}");
    assert!(error.contains("page.md, line 3: error-by-density small; ") && !out.join("error-by-density.svg").exists());

    let stdout = stdout_of("evaluate", &gallery);
    for part in ["page.md, line 6: density-by-head small", "density-by-head-s2o-paper.png", "error-by-density.svg"] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    assert_eq!(stdout_of("evaluate", &check).lines().count(), stdout.lines().count());
    let made = fs::read_to_string(&page).expect("a page");
    assert!(made.starts_with("# Mine\n\n<!-- gallery: error-by-density small -->\n\n!["), "{made}");
    assert!(made.ends_with("<!-- /gallery -->\n\nMine too.\n"), "{made}");
    for part in [
        "| method | density 0.5 | 0.6 |",
        "| sliding-window | ",
        "| layer | s2o | s2o-paper |",
        "\ncargo run --release --example evaluate -- experiment heads --methods s2o,s2o-paper --context 2304",
    ] {
        assert!(made.contains(part), "{part} in {made}");
    }
    assert!(fs::read(out.join("density-by-head-s2o.png")).is_ok_and(|png| png.starts_with(b"\x89PNG")));

    fs::write(&page, made.replace("| sliding-window | ", "| sliding-window | 0, ")).expect("written");
    assert!(error_of("evaluate", &check).contains("line 3: error-by-density small\n"));
}

#[test]
fn what_cannot_be_made_is_refused() {
    let directory = TempDir::new().expect("a directory");
    let page = directory.path().join("page.md");
    for (content, part) in [
        ("prose", "page.md: expected `<!-- gallery: NAME -->`, got a page without it"),
        ("<!-- gallery: niah a -->", "page.md, line 1: expected `<!-- /gallery -->` after "),
        ("<!-- gallery: magic a -->\n<!-- /gallery -->", "page.md, line 1: expected one of error-by-density, "),
        (
            "<!-- gallery: niah a -->\n<!-- /gallery -->",
            "line 1: niah a: docs/results/a: expected outcomes.jsonl or table.csv",
        ),
    ] {
        fs::write(&page, content).expect("written");
        let error = error_of("evaluate", &["gallery", "--page", text(&page)]);
        assert!(error.contains(part), "{content}: {error}");
        assert_eq!(fs::read_to_string(&page).expect("a page"), content);
    }
    let missing = directory.path().join("no.md");
    assert!(error_of("evaluate", &["gallery", "--page", text(&missing)]).contains("cannot read "));
}
