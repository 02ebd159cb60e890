//! `compare`: its rows, its files, and their agreement with the library.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_s2o::{KeyScore, Mask, S2oConfig, SegmentLen, StopRule, dense_attn, s2o_attn};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_has, assert_refused, error_of, number, rows_of, run, stdout_of, text};

/// Numbers of about unit variance, the same on every machine.
fn numbers(seed: u64, shape: (usize, usize, usize, usize)) -> Tensor {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let count = shape.0 * shape.1 * shape.2 * shape.3;
    let values: Vec<f32> = (0..count).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 1.7).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor")
}

fn save(path: &Path, tensors: &[(&str, &Tensor)]) {
    let map: HashMap<&str, Tensor> = tensors.iter().map(|(name, tensor)| (*name, (*tensor).clone())).collect();
    candle_core::safetensors::save(&map, path).expect("saved");
}

fn rows(args: &[&str]) -> Vec<Value> {
    rows_of("compare", &[args, &["--json"]].concat())
}

fn f32s(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).and_then(|t| t.flatten_all()?.to_vec1()).expect("numbers")
}

const KEYS: &str = "cosine density head layer mae measured measured_high measured_low method mse rel_l1 rel_l2 seconds";

#[test]
fn compare_agrees_with_the_library() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = |name: &str| directory.path().join(name);
    let (input, out, csv) = (file("qkv.safetensors"), file("out.safetensors"), file("rows.csv"));
    // Peaked attention, so that early stopping leaves a visible error.
    let q = numbers(1, (2, 1500, 4, 32));
    let (k, v) = (numbers(2, (2, 1500, 2, 32)), numbers(3, (2, 1500, 2, 32)));
    let scale = Tensor::new(&[0.5f32], &Device::Cpu).expect("a tensor");
    save(&input, &[("q", &q), ("k", &k), ("v", &v), ("softmax_scale", &scale)]);

    let flags = "--preset paper --segment 256 --tau 0.2 --stop-rule sum --score second-cumulant=0.5 --dense-below 0";
    let flags: Vec<&str> = flags.split(' ').collect();
    let files = ["--tensors", text(&input), "--out-tensors", text(&out), "--csv", text(&csv), "--repeat", "2"];
    let rows = rows(&[&files[..], &flags].concat());

    // Two methods, each with one row for all heads and one for each of four heads.
    assert_eq!(rows.len(), 10);
    for row in &rows {
        let mut keys: Vec<&str> = row.as_object().expect("an object").keys().map(String::as_str).collect();
        keys.sort();
        assert_eq!(keys.join(" "), KEYS);
        assert_eq!(row["layer"], 0);
        assert!(number(row, "seconds") > 0.0);
    }
    for row in &rows[..5] {
        assert_eq!(row["method"], "dense");
        let exact = ["mse", "mae", "rel_l1", "cosine", "density"].map(|key| number(row, key));
        assert_eq!(exact, [0.0, 0.0, 0.0, 1.0, 1.0]);
    }
    let (total, heads) = (&rows[5], &rows[6..]);
    assert_eq!((&total["method"], &total["head"]), (&json!("s2o"), &json!(-1)));
    for key in ["mse", "mae", "density"] {
        let mean = heads.iter().map(|row| number(row, key)).sum::<f64>() / 4.0;
        assert!((mean / number(total, key) - 1.0).abs() < 1e-9, "{key}: {mean} and {total}");
    }
    assert!(number(total, "density") < 0.9, "{total}");

    // The CSV holds the same rows.
    let mut reader = csv::Reader::from_path(&csv).expect("a CSV file");
    let header: Vec<String> = reader.headers().expect("a header").iter().map(str::to_owned).collect();
    let records: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().expect("records");
    assert_eq!(records.len(), rows.len());
    for (record, row) in records.iter().zip(&rows) {
        for (name, field) in header.iter().zip(record) {
            match &row[name] {
                Value::String(text) => assert_eq!(field, text),
                Value::Null => assert_eq!(field, ""),
                value => {
                    // serde_json may be off by the last bit when it reads a number.
                    let (got, expected) = (field.parse::<f64>().expect("a number"), value.as_f64().expect("a number"));
                    assert!((got - expected).abs() <= 1e-12 * expected.abs(), "{name}: {got} and {expected}");
                }
            }
        }
    }

    // The outputs are the library's, and the errors follow from them.
    let config = S2oConfig::paper().to_builder().segment_len(SegmentLen::Fixed(256)).tau(0.2).dense_below(0);
    let config = config.stop_rule(StopRule::SumRatio).key_score(KeyScore::SecondCumulant { c: 0.5 });
    let sparse = f32s(&s2o_attn(&q, &k, &v, 0.5, &config.build().expect("options")).expect("S2O"));
    let dense = f32s(&dense_attn(&q, &k, &v, 0.5, Mask::Causal).expect("dense"));
    let outputs = candle_core::safetensors::load(&out, &Device::Cpu).expect("outputs");
    assert_eq!(outputs["dense"].dims(), q.dims());
    assert!(f32s(&outputs["dense"]) == dense, "dense output");
    assert!(f32s(&outputs["s2o"]) == sparse, "S2O output");
    let pairs = || dense.iter().zip(&sparse).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let sum = |term: fn((f64, f64)) -> f64| pairs().map(term).sum::<f64>();
    let near = |key: &str, value: f64| assert!((number(total, key) / value - 1.0).abs() < 1e-9, "{key}: {value}");
    near("mse", sum(|(a, b)| (a - b).powi(2)) / dense.len() as f64);
    near("rel_l1", sum(|(a, b)| (a - b).abs()) / sum(|(a, _)| a.abs()));
    near("rel_l2", (sum(|(a, b)| (a - b).powi(2)) / sum(|(a, _)| a * a)).sqrt());
    near("cosine", sum(|(a, b)| a * b) / (sum(|(a, _)| a * a) * sum(|(_, b)| b * b)).sqrt());
}

#[test]
fn probes_measure_the_error() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = directory.path().join("qkv.safetensors");
    let q = numbers(1, (1, 3000, 4, 32));
    let (k, v) = (numbers(2, (1, 3000, 2, 32)), numbers(3, (1, 3000, 2, 32)));
    save(&path, &[("q", &q), ("k", &k), ("v", &v)]);
    let flags =
        ["--tensors", text(&path), "--segment", "256", "--tau", "0.2", "--dense-below", "0", "--dense-tail", "0"];
    let flags = [&flags[..], &["--stop-rule", "all"]].concat();
    let plain = rows(&flags);
    let probed = rows(&[&flags[..], &["--probe-stride", "16"]].concat());
    for (plain, probed) in plain[5..].iter().zip(&probed[5..]) {
        assert_eq!(plain["measured"], Value::Null);
        let [error, measured, low, high] =
            ["rel_l2", "measured", "measured_low", "measured_high"].map(|key| number(probed, key));
        assert!(error < 0.9 * number(plain, "rel_l2"), "{probed} after {plain}");
        assert!((0.8..1.25).contains(&(measured / error)), "{probed}");
        assert!(low < error && error < high, "{probed}");
        // A sixteenth of the scores, which fill less than their tiles, without the queries that saw every key.
        let more = number(probed, "density") - number(plain, "density");
        assert!((0.6 / 16.0..1.0 / 16.0).contains(&more), "{more}");
    }
}

#[test]
fn compare_takes_half_precision_and_chunks() {
    let directory = TempDir::new().expect("a temporary directory");
    // The queries are the last 300 of 1200 positions.
    let (q, k) = (numbers(4, (1, 300, 2, 64)), numbers(5, (1, 1200, 1, 64)));
    for dtype in [DType::F16, DType::BF16] {
        let path: PathBuf = directory.path().join(format!("{}.safetensors", dtype.as_str()));
        let half = |tensor: &Tensor| tensor.to_dtype(dtype).expect("converted");
        save(&path, &[("q", &half(&q)), ("k", &half(&k)), ("v", &half(&k))]);
        let rows = rows(&["--tensors", text(&path), "--methods", "s2o"]);
        assert_eq!(rows.len(), 3);
        assert!(rows[0]["cosine"].as_f64() > Some(0.9), "{}", rows[0]);
    }
}

#[test]
fn files_that_cannot_be_written_are_refused_before_any_work() {
    let directory = TempDir::new().expect("a temporary directory");
    let inside = directory.path().join("no/such/file");
    // Their source does not exist either, which is found later.
    let sources = [("--save-tensors", "--model", "no/such.gguf"), ("--out-tensors", "--tensors", "no/such")];
    for (flag, source, missing) in sources {
        assert_refused("compare", &[source, missing], &[(&[flag, text(&inside)], "cannot write")]);
        let kept = directory.path().join("kept");
        assert_refused("compare", &[source, missing], &[(&[flag, text(&kept)], missing)]);
        assert!(!kept.exists());
        fs::write(&kept, "before").expect("written");
        assert_refused("compare", &[source, missing], &[(&[flag, text(&kept)], missing)]);
        assert_eq!(fs::read_to_string(&kept).expect("a file"), "before");
        fs::remove_file(&kept).expect("removed");
    }
}

#[test]
fn bad_tensor_files_are_refused() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("bad.safetensors");
    let refused = |tensors: &[(&str, &Tensor)], part: &str| {
        save(&file, tensors);
        assert_refused("compare", &["--tensors", text(&file)], &[(&[], part)]);
    };
    let q = numbers(6, (1, 64, 2, 16));
    let flat = q.squeeze(0).expect("three dimensions");
    let wide = numbers(7, (1, 64, 2, 24));
    let double = q.to_dtype(DType::F64).expect("converted");
    let two = Tensor::new(&[0.5f32, 0.5], &Device::Cpu).expect("a tensor");
    refused(&[("queries", &q)], "expected tensors q, k and v, or layer.N.q, layer.N.k and layer.N.v, got queries");
    refused(&[("q", &q), ("k", &q)], "expected a tensor `v` in addition to the queries, got k, q");
    refused(&[("layer.3.q", &q)], "expected a tensor `layer.3.k`");
    refused(
        &[("q", &flat), ("k", &q), ("v", &q)],
        "q: expected 4 dimensions (batch, length, heads, head_dim), got [64, 2, 16]",
    );
    refused(&[("q", &q), ("k", &wide), ("v", &wide)], "expected");
    let (heads_first, fewer) = (numbers(8, (1, 4, 600, 16)), numbers(9, (1, 2, 600, 16)));
    refused(&[("q", &heads_first), ("k", &fewer), ("v", &fewer)], "transpose(1, 2)");
    refused(&[("q", &double), ("k", &double), ("v", &double)], "q: expected dtype F32, F16 or BF16, got F64");
    refused(
        &[("q", &q), ("k", &q), ("v", &q), ("softmax_scale", &two)],
        "softmax_scale: expected one number, got a tensor of shape [2]",
    );

    save(&file, &[("q", &q), ("k", &q), ("v", &q)]);
    let path = text(&file);
    assert_refused("compare", &["--tensors", path], &[(&["--layers", "4"], "expected layers [0], got layer 4")]);
    let bytes = fs::read(&file).expect("a file");
    fs::write(&file, &bytes[..bytes.len() - 100]).expect("written");
    let cases = [(path, "bad.safetensors is not a valid safetensors file"), ("no/such", "cannot read no/such")];
    for (path, part) in cases {
        assert_refused("compare", &["--tensors", path], &[(&[], part)]);
    }
}

#[test]
fn more_heads_than_tokens_are_a_warning() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("heads_first.safetensors");
    // Queries, keys, heads. One query of many keys is a step of decoding.
    for (q_len, k_len, heads, warns) in [(4, 4, 5, true), (4, 4, 4, false), (1, 8, 5, false)] {
        let (q, k) = (numbers(10, (1, q_len, heads, 16)), numbers(11, (1, k_len, heads, 16)));
        save(&file, &[("layer.3.q", &q), ("layer.3.k", &k), ("layer.3.v", &k)]);
        let output = run("compare", &["--tensors", text(&file), "--json"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let warned = stderr.contains("warning: layer 3 has 5 heads but 4 tokens") && stderr.contains("transpose(1, 2)");
        assert_eq!(warned, warns, "{stderr}");
    }
}

#[test]
fn captured_tensors_compare_as_the_model_does() {
    let directory = TempDir::new().expect("a temporary directory");
    let file = directory.path().join("captured.safetensors");
    for (layers, names) in [("4", vec!["k", "q", "softmax_scale", "v"]), ("1,4", vec![])] {
        let capture = ["--context", "1500", "--chunk", "600", "--layers", layers, "--save-tensors", text(&file)];
        let untimed = |mut rows: Vec<Value>| -> Vec<Value> {
            rows.iter_mut().for_each(|row| row["seconds"] = Value::Null);
            rows
        };
        let captured = untimed(rows(&capture));
        let read = untimed(rows(&["--tensors", text(&file)]));
        assert_eq!(captured, read);
        assert_eq!(captured.last().expect("rows")["layer"], 4);
        let saved = candle_core::safetensors::load(&file, &Device::Cpu).expect("captured tensors");
        let mut found: Vec<&str> = saved.keys().map(String::as_str).collect();
        found.sort_unstable();
        if names.is_empty() {
            assert!(found.contains(&"layer.1.q") && found.contains(&"layer.4.v"), "{found:?}");
        } else {
            assert_eq!(found, names);
        }
    }
    let args = ["--layers", "10", "--context", "100"];
    assert_refused("compare", &[], &[(&args, "error: --layers: expected layers 0 to 9, got 10")]);
}

#[test]
fn compare_against_candles_own_ops() {
    let directory = TempDir::new().expect("a temporary directory");
    let input = directory.path().join("qkv.safetensors");
    // Long enough for several batches of query rows. The queries are the last positions of more keys.
    let (q, k, v) = (numbers(8, (2, 700, 4, 32)), numbers(9, (2, 900, 2, 32)), numbers(10, (2, 900, 2, 32)));
    save(&input, &[("q", &q), ("k", &k), ("v", &v)]);
    let sparse = ["--dense-below", "0", "--dense-tail", "0", "--segment", "256", "--tau", "0.3"];
    let flags = [&["--tensors", text(&input), "--against", "sdpa-dense"][..], &sparse].concat();
    let rows = rows(&flags);
    let totals: Vec<&Value> = rows.iter().filter(|row| row["head"] == -1).collect();
    let methods: Vec<&str> = totals.iter().filter_map(|row| row["method"].as_str()).collect();
    assert_eq!(methods, ["sdpa-dense", "dense", "s2o"]);
    let [own, dense, sparse] = [0, 1, 2].map(|i| number(totals[i], "rel_l1"));
    assert!(own == 0.0 && dense > 0.0 && dense < 1e-5 && sparse > 1e-4, "{totals:?}");

    let parts = ["dense agrees with sdpa-dense to ", "s2o differs from sdpa-dense by ", "most in layer 0 head "];
    assert_has(&stdout_of("compare", &flags), &parts);
}

#[test]
#[cfg(not(feature = "flash-attn"))]
fn a_peer_that_is_not_built_says_how_to_get_it() {
    let error = error_of("compare", &["--against", "flash-attn", "--cpu"]);
    assert_has(&error, &["expected a build with candle-flash-attn, got one without", "--features cuda,flash-attn"]);
}
