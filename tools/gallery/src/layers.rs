//! Means over layers: the experiments write one row for each layer of a prompt.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use serde::de::DeserializeOwned;

use crate::rows::{Sourced, distinct, missing, newest_runs, of_experiment};

/// A row about one layer.
pub trait LayerRow {
    /// The method. At each length its last run counts.
    fn method(&self) -> &str;
    /// A text that the rows of all layers of one setting share, and that differs from all other settings of the length.
    fn setting(&self) -> String;
    fn layer(&self) -> usize;
    /// Number of keys.
    fn tokens(&self) -> usize;
}

/// Implements [`LayerRow`] with the columns `layer`, `tokens` and `$method`.
macro_rules! layer_row {
    ($row:ty, $method:ident, $setting:expr) => {
        impl $crate::layers::LayerRow for $row {
            fn method(&self) -> &str {
                &self.$method
            }

            fn setting(&self) -> String {
                let setting: fn(&Self) -> String = $setting;
                setting(self)
            }

            fn layer(&self) -> usize {
                self.layer
            }

            fn tokens(&self) -> usize {
                self.tokens
            }
        }
    };
}
pub(crate) use layer_row;

/// The rows of a setting at a length, one for each layer.
pub struct Setting<'r, R> {
    any: &'r Sourced<R>,
    by_layer: BTreeMap<usize, &'r R>,
}

/// All settings that were measured at one length, on the same layers.
pub struct Length<'r, R> {
    /// Number of keys.
    pub tokens: usize,
    layers: Vec<usize>,
    /// In the order of the rows.
    pub settings: Vec<Setting<'r, R>>,
}

/// Reads the newest rows of the experiment `name` in a directory.
pub fn read<R: LayerRow + DeserializeOwned>(directory: &Path, name: &str, columns: &str) -> Result<Vec<Sourced<R>>> {
    let rows = of_experiment::<R>(directory, name, columns)?;
    Ok(newest_runs(rows, |row| (row.tokens(), row.method().to_owned())))
}

/// The lengths, in ascending order.
pub fn by_length<R: LayerRow>(rows: &[Sourced<R>]) -> Result<Vec<Length<'_, R>>> {
    let mut lengths = distinct(rows.iter().map(|row| row.row.tokens()));
    lengths.sort_unstable();
    lengths.into_iter().map(|tokens| Length::new(tokens, rows)).collect()
}

impl<'r, R: LayerRow> Length<'r, R> {
    fn new(tokens: usize, rows: &'r [Sourced<R>]) -> Result<Self> {
        let mut settings: Vec<Setting<R>> = Vec::new();
        let mut places = BTreeMap::new();
        for row in rows.iter().filter(|row| row.row.tokens() == tokens) {
            let place = *places.entry(row.row.setting()).or_insert(settings.len());
            if place == settings.len() {
                settings.push(Setting { any: row, by_layer: BTreeMap::new() });
            }
            // The last row counts: a run may have been repeated.
            settings[place].by_layer.insert(row.row.layer(), &row.row);
        }
        let layers = settings.first().map(Setting::layers).unwrap_or_default();
        if let Some(other) = settings.iter().find(|setting| setting.layers() != layers) {
            let expected =
                format!("{} of {} at {tokens} tokens, as of the first", named(&layers), other.row().setting());
            bail!(missing(&other.any.path, &expected, &named(&other.layers())));
        }
        Ok(Self { tokens, layers, settings })
    }

    /// Heading of a table: `8190 tokens, layers 0, 2 and 4`.
    pub fn heading(&self) -> String {
        format!("{} tokens, {}", self.tokens, named(&self.layers))
    }

    /// The methods, each with its settings.
    pub fn methods(&self) -> Vec<(&'r str, Vec<&Setting<'r, R>>)> {
        let own = |method: &str| self.settings.iter().filter(|setting| setting.row().method() == method).collect();
        let methods = distinct(self.settings.iter().map(|setting| setting.row().method()));
        methods.into_iter().map(|method| (method, own(method))).collect()
    }
}

impl<'r, R> Setting<'r, R> {
    /// One of the rows, for the columns that all of them share.
    pub fn row(&self) -> &'r R {
        &self.any.row
    }

    pub fn mean(&self, of: impl Fn(&R) -> f64) -> f64 {
        self.by_layer.values().map(|row| of(row)).sum::<f64>() / self.by_layer.len() as f64
    }

    fn layers(&self) -> Vec<usize> {
        self.by_layer.keys().copied().collect()
    }
}

/// `layer 4`, `layers 0, 2 and 4`.
fn named(layers: &[usize]) -> String {
    let names: Vec<String> = layers.iter().map(ToString::to_string).collect();
    match names.as_slice() {
        [all @ .., last] if !all.is_empty() => format!("layers {} and {last}", all.join(", ")),
        names => format!("layer {}", names.concat()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Row {
        name: &'static str,
        layer: usize,
        tokens: usize,
        value: f64,
    }
    layer_row!(Row, name, |row| format!("`{}`", row.name));

    fn sourced(rows: &[(&'static str, usize, usize, f64)]) -> Vec<Sourced<Row>> {
        let rows = rows.iter().map(|&(name, layer, tokens, value)| Row { name, layer, tokens, value });
        let sourced = |row| Sourced { row, provenance: Default::default(), path: "rows.csv".into() };
        rows.map(sourced).collect()
    }

    #[test]
    fn rows_become_means() {
        let rows = [
            ("b", 4, 99, 9.0),
            ("b", 0, 99, 1.0),
            ("a", 0, 99, 5.0),
            ("a", 4, 99, 7.0),
            ("a", 2, 50, 8.0),
            ("b", 4, 99, 3.0),
        ];
        let rows = sourced(&rows);
        let lengths = by_length(&rows).expect("lengths");
        let headings: Vec<String> = lengths.iter().map(Length::heading).collect();
        assert_eq!(headings, ["50 tokens, layer 2", "99 tokens, layers 0 and 4"]);
        let means: Vec<_> = lengths[1].settings.iter().map(|own| (own.row().name, own.mean(|row| row.value))).collect();
        assert_eq!(means, [("b", 2.0), ("a", 6.0)]);
        let methods: Vec<_> = lengths[1].methods().iter().map(|(name, own)| (*name, own.len())).collect();
        assert_eq!(methods, [("b", 1), ("a", 1)]);
    }

    #[test]
    fn means_over_other_layers_are_not_compared() {
        let rows = [("a", 0), ("a", 2), ("a", 5), ("b", 0), ("b", 2)].map(|(name, layer)| (name, layer, 99, 1.0));
        let error = by_length(&sourced(&rows)).err().expect("an error").to_string();
        assert_eq!(
            error,
            "rows.csv: expected layers 0, 2 and 5 of `b` at 99 tokens, as of the first, got layers 0 and 2"
        );
    }
}
