//! The examples run and print the expected results.

use std::path::Path;
use std::process::Command;

/// The output of an example. Cargo builds the examples before the tests, but gives tests only the paths of binaries.
fn output_of(example: &str) -> String {
    let test = std::env::current_exe().expect("the test has a path");
    let target = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let path = target.join("examples").join(format!("{example}{}", std::env::consts::EXE_SUFFIX));
    let output = Command::new(&path).output().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The numbers after `name` in a text.
fn numbers(text: &str, name: &str) -> Vec<f64> {
    let rests = text.split(name).skip(1);
    rests
        .map(|rest| {
            let word = rest.split_whitespace().next().unwrap_or_default().trim_end_matches(',');
            word.parse().unwrap_or_else(|_| panic!("a number after `{name}`, got `{word}` in {text}"))
        })
        .collect()
}

#[test]
fn attend_trades_density_for_error() {
    let text = output_of("attend");
    let (density, error) = (numbers(&text, "density"), numbers(&text, "error"));
    assert_eq!((density.len(), error.len()), (3, 3), "{text}");
    assert!(density.is_sorted_by(|a, b| a > b) && density.iter().all(|d| (0.1..0.95).contains(d)), "{text}");
    assert!(error.is_sorted() && error[0] > 0.0 && error[1] < 0.2, "{text}");
}

#[test]
fn the_custom_op_is_the_function() {
    let text = output_of("custom_op");
    assert!(text.starts_with("output [1, 4096, 4, 64]\n"), "{text}");
    assert_eq!(numbers(&text, "s2o_attn:"), [0.0], "{text}");
    assert!(text.contains("wrong keys: ") && text.contains("96"), "{text}");
}

#[test]
fn chunks_give_the_output_of_the_whole() {
    let text = output_of("chunked");
    let density = numbers(&text, "density");
    assert_eq!(density.len(), 4, "{text}");
    assert!(density[1..].iter().all(|density| *density < 0.95), "{text}");
    let difference = numbers(&text, "the whole prompt:");
    // The last bits depend on the number of rows in a product.
    assert!(difference[0] < 1e-5, "{text}");
}

#[test]
fn every_method_finds_the_key() {
    let text = output_of("plug_into_model");
    let answers = ["expected:", "\ndense:", "\ns2o:", "\ndense first:"].map(|name| numbers(&text, name));
    assert!(answers.iter().all(|answer| answer.len() == 1 && answer == &answers[0]), "{text}");
    assert!(numbers(&text, "density of s2o:")[0] < 0.9, "{text}");
}
