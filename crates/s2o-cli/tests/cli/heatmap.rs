//! `heatmap`: its files, and agreement of its table with `compare` for the same head.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::{assert_refused, number, rows_of, stdout_of, text};

/// A prompt that is short enough for a test and long enough for a prefix.
const PROMPT: [&str; 6] = ["--context", "1024", "--segment", "256", "--dense-below", "0"];

/// Title, density and softmax mass of each panel, as printed.
fn table(stdout: &str) -> Vec<(String, f64, f64)> {
    let rows = stdout.lines().filter(|line| line.starts_with("| ("));
    rows.map(|row| {
        let words: Vec<&str> = row.trim_matches('|').split_whitespace().collect();
        let [title @ .., density, mass] = words.as_slice() else { panic!("{row}") };
        let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("{word} in {row}"));
        (title.join(" "), number(density), number(mass))
    })
    .collect()
}

fn heatmap(out: &Path, args: &[&str]) -> Vec<(String, f64, f64)> {
    table(&stdout_of("heatmap", &[&PROMPT[..], &["--out", text(out)], args].concat()))
}

#[test]
fn heatmap_draws_four_panels_and_says_what_they_hold() {
    let directory = TempDir::new().expect("a temporary directory");
    let out = directory.path().join("pictures");
    let flags = ["--tau", "0.2", "--dense-tail", "0"];
    let rows = heatmap(&out, &[&["--layer", "7", "--head", "2", "--cells", "64"][..], &flags].concat());

    let titles: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    let expected =
        ["(a) original", "(b) K/V-permuted by PBS-Attn", "(c) K/V-permuted by S2O", "(d) Q and K/V permuted by S2O"];
    assert_eq!(titles, expected);
    assert_eq!((rows[0].1, rows[0].2), (1.0, 1.0));
    for (title, density, mass) in &rows[1..] {
        assert!(*density > 0.0 && *mass > 0.5 && *mass < 1.0, "{title}: {density}, {mass}");
    }

    let probed =
        [&PROMPT[..], &["--out", text(&out), "--layer", "7", "--cells", "64", "--probe-stride", "16"]].concat();
    let probed = stdout_of("heatmap", &probed);
    assert!(probed.contains(", a probe every 16 queries\n"), "{probed}");
    let measured = probed.lines().filter(|line| line.ends_with(", measured on the probes"));
    let titles: Vec<&str> = measured.filter_map(|line| Some(line.split_once(": error 0.")?.0)).collect();
    assert_eq!(titles, expected[2..]);

    let args = [&PROMPT[..], &["--layers", "7", "--methods", "s2o", "--json"], &flags].concat();
    let compared = rows_of("compare", &args);
    let density = number(compared.iter().find(|row| row["head"] == 2).expect("the head"), "density");
    assert!(density < 0.9 && (rows[2].1 - density).abs() < 5.1e-4, "{} and {density}", rows[2].1);

    let png = fs::read(out.join("attention-layer7-head2.png")).expect("a PNG");
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 10_000);
    let svg = fs::read_to_string(out.join("attention-layer7-head2.svg")).expect("an SVG");
    for label in expected.iter().chain(&["key, ranked per segment of 256", "query, permuted per segment"]) {
        assert!(svg.contains(&format!(">{label}</text>")), "{label}");
    }
}

#[test]
fn heatmap_of_all_tiles_holds_all_mass() {
    let directory = TempDir::new().expect("a temporary directory");
    // A threshold that never stops, and the dense path of short prompts.
    for args in [
        ["--dense-below", "0", "--tau", "0", "--pool", "mean"],
        ["--dense-below", "4096", "--tau", "0.5", "--pool", "max"],
    ] {
        let prompt = ["--context", "600", "--segment", "256", "--out", text(directory.path())];
        let stdout = stdout_of("heatmap", &[prompt, args].concat());
        for (title, density, mass) in &table(&stdout)[2..] {
            assert_eq!((*density, *mass), (1.0, 1.0), "{title} {args:?}");
        }
    }
}

#[test]
fn heatmap_says_what_there_is_to_look_at() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("file");
    fs::write(&file, "").expect("written");
    let wrong: &[(&[&str], &str)] = &[
        (&["--head", "4"], "--head: expected heads 0 to 3, got 4"),
        (&["--layer", "10"], "--layer: expected layers 0 to 9, got 10"),
        (&["--out", text(&file)], "cannot write"),
    ];
    assert_refused("heatmap", &["--context", "256"], wrong);
    // The model does not exist either, which is found later.
    let (inside, new) = (file.join("out"), directory.path().join("new/out"));
    let model = ["--model", "no/such.safetensors/model"];
    let cases: &[(&[&str], &str)] = &[(&["--out", text(&inside)], "cannot write"), (&["--out", text(&new)], "missing")];
    assert_refused("heatmap", &model, cases);
    assert!(!directory.path().join("new").exists(), "it leaves no directory");
}
