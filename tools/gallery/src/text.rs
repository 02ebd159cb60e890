//! Numbers, names, links and tables in the format of the page.

use std::fmt::Display;
use std::path::{Component, Path};

pub use s2o_eval::report::{inline, pivot};

/// An error with two digits: `1.9e-3`.
pub fn error(value: f64) -> String {
    format!("{value:.1e}")
}

/// A share with this many decimals: `.204`. A value that rounds to zero has the form of [`error`].
pub fn share(value: f64, decimals: usize) -> String {
    if value > 0.0 && value < 0.5 * 0.1f64.powi(decimals as i32) {
        return error(value);
    }
    let text = format!("{value:.decimals$}");
    text.strip_prefix("0.").map_or(text.clone(), |digits| format!(".{digits}"))
}

/// Three digits and no exponent: `7.61`, `20.4`, `153`.
pub fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// A length in tokens: `32K`, or all digits if it is not a multiple of 1024.
pub fn tokens(count: usize) -> String {
    if count >= 1024 && count.is_multiple_of(1024) { format!("{}K", count / 1024) } else { count.to_string() }
}

/// A name for use in file names and links.
pub fn slug(name: &str) -> String {
    let is_separator = |c: char| !c.is_ascii_alphanumeric() && c != '.';
    name.split(is_separator).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-").to_lowercase()
}

/// The relative link from the directory `from` to `to`; both are absolute.
pub fn link(from: &Path, to: &Path) -> String {
    let (from, to): (Vec<_>, Vec<_>) = (from.components().collect(), to.components().collect());
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from[common..].iter().map(|_| "..".to_owned());
    let down = to[common..].iter().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    });
    let link = up.chain(down).collect::<Vec<_>>().join("/");
    if link.contains(|c: char| c.is_whitespace() || "()".contains(c)) { format!("<{link}>") } else { link }
}

/// Columns of numbers: the name of the first says what they are.
pub fn with_unit<C: Display + Copy>(unit: &str, values: &[C]) -> Vec<(String, C)> {
    let name = |i: usize, value: C| if i == 0 { format!("{unit} {value}") } else { value.to_string() };
    values.iter().enumerate().map(|(i, &value)| (name(i, value), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([1.9064e-3, 2.2e-5, 0.0].map(error), ["1.9e-3", "2.2e-5", "0.0e0"]);
        assert_eq!([0.20449, 1.0, 0.0, 3e-5].map(|value| share(value, 3)), [".204", "1.000", ".000", "3.0e-5"]);
        assert_eq!([0.456, 7.6115, 9.996, 20.39, 153.2].map(three_digits), ["0.46", "7.61", "10.0", "20.4", "153"]);
        assert_eq!([512, 8190, 8192, 131_072].map(tokens), ["512", "8190", "8K", "128K"]);
    }

    #[test]
    fn names_of_rows_are_names_of_files() {
        assert_eq!(slug("niah s2o:tau=0.05, NVIDIA/x"), "niah-s2o-tau-0.05-nvidia-x");
    }

    #[test]
    fn links_are_relative() {
        let link = |to: &str| link(Path::new("/r/docs"), Path::new(to));
        assert_eq!(link("/r/docs/results/a.png"), "results/a.png");
        assert_eq!(link("/r/benches/record/a.csv"), "../benches/record/a.csv");
        assert_eq!(link("/r/docs/two words.csv"), "<two words.csv>");
    }
}
