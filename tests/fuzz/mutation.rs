//! Mutations of files: hostile values in JSON, and bytes.

use serde_json::{Map, Value, json};

/// How a file is mutated besides its bytes.
#[derive(Debug, Clone, Copy)]
pub enum Format {
    Json,
    JsonLines,
    /// A JSON header after its length.
    Safetensors,
    Binary,
}

/// Bytes at the start of a binary file that are mutated more often than the rest.
const HEADER: usize = 1024;

/// A number below `n`, which is at least 1.
fn below(n: usize, draw: &mut impl FnMut() -> f32) -> usize {
    (((draw() + 0.5) * n as f32) as usize).min(n - 1)
}

/// A mutated file, and what was done.
pub fn mutate(bytes: &[u8], format: Format, draw: &mut impl FnMut() -> f32) -> (Vec<u8>, String) {
    let structured = below(10, draw) < 7;
    match format {
        Format::Json if structured => {
            let (value, what) = mutated_json(bytes, draw);
            (value.to_string().into_bytes(), what)
        }
        Format::JsonLines if structured => {
            let mut lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).collect();
            let line = below(lines.len(), draw);
            if below(6, draw) == 0 {
                lines.push(lines[line]);
                return (joined(&lines), format!("line {line} repeated"));
            }
            let (value, what) = mutated_json(lines[line], draw);
            let mutated = value.to_string().into_bytes();
            lines[line] = &mutated;
            (joined(&lines), format!("line {line}: {what}"))
        }
        Format::Safetensors if structured => {
            let (length, rest) = bytes.split_first_chunk().expect("a length");
            let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
            let (value, what) = mutated_json(header, draw);
            let header = value.to_string().into_bytes();
            ([&(header.len() as u64).to_le_bytes()[..], &header, data].concat(), what)
        }
        _ => mutated_bytes(bytes, draw),
    }
}

/// Lines that all have an end: a journal drops a last line without one.
fn joined(lines: &[&[u8]]) -> Vec<u8> {
    lines.iter().flat_map(|line| [line, &b"\n"[..]]).collect::<Vec<_>>().concat()
}

/// A JSON value with one node replaced, removed, renamed or exchanged.
fn mutated_json(bytes: &[u8], draw: &mut impl FnMut() -> f32) -> (Value, String) {
    let mut value: Value = serde_json::from_slice(bytes).expect("the original is JSON");
    let mut places = Vec::new();
    collect(&value, String::new(), &mut places);
    let place = places[below(places.len(), draw)].clone();
    let (parent, key) =
        place.rsplit_once('/').map_or((String::new(), None), |(parent, key)| (parent.to_owned(), Some(key)));
    let what = match (below(6, draw), key) {
        (0, Some(key)) => {
            remove(value.pointer_mut(&parent).expect("a parent"), key);
            format!("{place} removed")
        }
        (1, Some(key)) => {
            let removed = remove(value.pointer_mut(&parent).expect("a parent"), key);
            if let (Some(Value::Object(object)), Some(removed)) = (value.pointer_mut(&parent), removed) {
                object.insert(format!("{key}_"), removed);
            }
            format!("{place} renamed")
        }
        (2, _) => {
            let other = places[below(places.len(), draw)].clone();
            let from = value.pointer(&other).expect("a node").clone();
            *value.pointer_mut(&place).expect("a node") = from;
            format!("{place} is a copy of {other}")
        }
        _ => {
            let hostile = hostile(draw);
            let what = format!("{place} is {}", hostile.to_string().chars().take(40).collect::<String>());
            *value.pointer_mut(&place).expect("a node") = hostile;
            what
        }
    };
    (value, what)
}

/// Pointers of all nodes, at most 64 children of each.
fn collect(value: &Value, place: String, places: &mut Vec<String>) {
    places.push(place.clone());
    match value {
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate().take(64) {
                collect(item, format!("{place}/{i}"), places);
            }
        }
        Value::Object(object) => {
            for (key, item) in object.iter().take(64) {
                collect(item, format!("{place}/{}", key.replace('~', "~0").replace('/', "~1")), places);
            }
        }
        _ => {}
    }
}

fn remove(parent: &mut Value, key: &str) -> Option<Value> {
    match parent {
        Value::Object(object) => object.remove(&key.replace("~1", "/").replace("~0", "~")),
        Value::Array(items) => key.parse().ok().map(|i: usize| items.remove(i)),
        _ => None,
    }
}

fn hostile(draw: &mut impl FnMut() -> f32) -> Value {
    let deep = || (0..100).fold(json!(1), |inner, _| json!([inner]));
    let values: [fn() -> Value; 18] = [
        || Value::Null,
        || json!(true),
        || json!(0),
        || json!(-1),
        || json!(1),
        || json!(3),
        || json!(0.5),
        || json!(1e-30),
        || json!(1e308),
        || json!(u64::MAX),
        || json!(1u64 << 40),
        || json!(u32::MAX),
        || json!(""),
        || json!("yarn"),
        || json!("\u{1F600}".repeat(3)),
        || json!("x".repeat(100_000)),
        || json!([]),
        || Value::Object(Map::new()),
    ];
    match below(values.len() + 1, draw) {
        i if i < values.len() => values[i](),
        _ => deep(),
    }
}

/// A file with some bytes changed, more often near its start.
fn mutated_bytes(bytes: &[u8], draw: &mut impl FnMut() -> f32) -> (Vec<u8>, String) {
    let mut bytes = bytes.to_vec();
    let range = if below(10, draw) < 7 { bytes.len().min(HEADER) } else { bytes.len() };
    let at = below(range, draw);
    let what = match below(6, draw) {
        0 => {
            bytes.truncate(at);
            format!("cut at byte {at}")
        }
        1 => {
            bytes[at] ^= 1 << below(8, draw);
            format!("a bit of byte {at} flipped")
        }
        2 => {
            let extremes = [0, 1, u64::MAX, i64::MAX as u64, 1 << 32, 1 << 40, 7];
            let number = extremes[below(extremes.len(), draw)];
            let end = (at + 8).min(bytes.len());
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            format!("{number} at byte {at}")
        }
        3 => {
            let end = (at + 1 + below(64, draw)).min(bytes.len());
            bytes.drain(at..end);
            format!("bytes {at} to {end} removed")
        }
        4 => {
            let end = (at + 1 + below(64, draw)).min(bytes.len());
            let copy = bytes[at..end].to_vec();
            bytes.splice(at..at, copy);
            format!("bytes {at} to {end} twice")
        }
        _ => {
            let count = 1 + below(8, draw);
            for _ in 0..count {
                let at = below(range, draw);
                bytes[at] = below(256, draw) as u8;
            }
            format!("{count} bytes before {range} changed")
        }
    };
    (bytes, what)
}

/// Every format is changed by most seeds, and by each seed in the same way.
pub fn check() {
    let header = br#"{"a":{"b":[1]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes()[..], header, b"data"].concat();
    for (format, bytes) in [
        (Format::Json, br#"{"a": [1, {"b~/c": "x"}], "d": null}"#.to_vec()),
        (Format::JsonLines, b"{\"a\": 1}\n{\"b\": [2]}\n".to_vec()),
        (Format::Safetensors, safetensors),
        (Format::Binary, vec![7; 3000]),
    ] {
        let of_seed = |seed| mutate(&bytes, format, &mut s2o_testkit::uniform(seed)).0;
        let changed = (0..200).filter(|&seed| of_seed(seed) != bytes).count();
        assert!(changed > 150, "{format:?}: {changed} of 200 seeds change the file");
        assert!((0..50).all(|seed| of_seed(seed) == of_seed(seed)), "{format:?}: a seed is one mutation");
    }
}
