//! Means over layers: the experiments write one row for each layer of a prompt.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use serde::de::DeserializeOwned;

use crate::rows::{Sourced, ascending, missing, newest_runs, of_experiment};
use crate::section::Section;
use crate::text::inline;

/// A kind of entry that shows means over the layers.
pub struct Experiment<R> {
    /// Name of the experiment and of its file.
    pub name: &'static str,
    /// The columns that it needs.
    pub columns: &'static str,
    /// What the tables show.
    pub intro: &'static str,
    /// Whether each method of a length has a table of its own.
    pub is_by_method: bool,
    pub key: fn(&R) -> Key,
    /// Draws the picture of a group and returns its table.
    pub render: fn(&Group<R>, &mut Section) -> Result<String>,
}

/// What distinguishes the rows of an experiment.
#[derive(Debug)]
pub struct Key {
    /// The method. At each length its last run counts.
    pub method: String,
    /// A text that the rows of all layers of one setting share, and that differs from all other settings of the length.
    pub setting: String,
    pub layer: usize,
    /// Number of keys.
    pub tokens: usize,
}

/// The rows of a setting at a length, one for each layer.
pub struct Setting<'r, R> {
    key: Key,
    any: &'r Sourced<R>,
    by_layer: BTreeMap<usize, &'r R>,
}

/// Settings that share a table. All settings of a length were measured on the same layers.
pub struct Group<'r, R> {
    /// `8190 tokens, layers 0, 2 and 4`, after the method if the group is of one method.
    pub heading: String,
    /// The method of the first setting.
    pub method: String,
    /// Number of keys.
    pub tokens: usize,
    /// In the order of the rows.
    pub settings: Vec<Setting<'r, R>>,
}

impl Key {
    pub fn new(method: &str, setting: String, layer: usize, tokens: usize) -> Self {
        Self { method: method.to_owned(), setting, layer, tokens }
    }
}

impl<R: DeserializeOwned> Experiment<R> {
    /// The entry of the newest rows in a directory.
    pub fn section(&self, directory: &Path) -> Result<Section> {
        let rows = newest_runs(of_experiment(directory, self.name, self.columns)?, |row| {
            let Key { method, tokens, .. } = (self.key)(row);
            (tokens, method)
        });
        let mut section = Section::new(directory);
        section.cite(&rows);
        section.text = format!("{}\n", self.intro);
        for group in groups(&rows, self.key, self.is_by_method)? {
            let table = (self.render)(&group, &mut section)?;
            section.text.push_str(&format!("\n{}:\n\n{table}", group.heading));
        }
        Ok(section)
    }
}

/// The groups of all lengths, in ascending order of length.
fn groups<R>(rows: &[Sourced<R>], key: fn(&R) -> Key, is_by_method: bool) -> Result<Vec<Group<'_, R>>> {
    let mut groups = Vec::new();
    for tokens in ascending(rows.iter().map(|row| key(row).tokens)) {
        let mut settings: Vec<Setting<R>> = Vec::new();
        for (row, key) in rows.iter().map(|row| (row, key(row))).filter(|(_, key)| key.tokens == tokens) {
            let place = settings.iter().position(|own| own.key.setting == key.setting).unwrap_or(settings.len());
            let layer = key.layer;
            if place == settings.len() {
                settings.push(Setting { key, any: row, by_layer: BTreeMap::new() });
            }
            // The last row counts: a run may have been repeated.
            settings[place].by_layer.insert(layer, row);
        }
        let layers = settings[0].layers();
        if let Some(other) = settings.iter().find(|own| own.layers() != layers) {
            let expected = format!("{layers} of {} at {tokens} tokens, as of the first", other.key.setting);
            bail!(missing(&other.any.path, &expected, &other.layers()));
        }
        let heading = format!("{tokens} tokens, {layers}");
        while let Some(Setting { key: Key { method, .. }, .. }) = settings.first() {
            let method = method.clone();
            let heading = if is_by_method { format!("{}, {heading}", inline(&method)) } else { heading.clone() };
            let (own, others) = settings.into_iter().partition(|own| !is_by_method || own.key.method == method);
            settings = others;
            groups.push(Group { heading, method, tokens, settings: own });
        }
    }
    Ok(groups)
}

impl<'r, R> Setting<'r, R> {
    /// One of the rows, for the columns that all of them share.
    pub fn row(&self) -> &'r R {
        self.any
    }

    pub fn mean(&self, of: impl Fn(&R) -> f64) -> f64 {
        self.by_layer.values().map(|row| of(row)).sum::<f64>() / self.by_layer.len() as f64
    }

    /// The mean of a column in seconds.
    pub fn milliseconds(&self, of: impl Fn(&R) -> f64) -> f64 {
        1e3 * self.mean(of)
    }

    /// `layer 4`, `layers 0, 2 and 4`.
    fn layers(&self) -> String {
        let names: Vec<String> = self.by_layer.keys().map(ToString::to_string).collect();
        match names.as_slice() {
            [all @ .., last] if !all.is_empty() => format!("layers {} and {last}", all.join(", ")),
            names => format!("layer {}", names.concat()),
        }
    }
}
