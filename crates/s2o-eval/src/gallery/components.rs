//! `components`: what the parts of S2O contribute, from the experiment of that name.

use std::path::Path;

use super::error::Result;
use super::layers::{LayerRow, Setting, by_length, read};
use super::section::{Provenance, Section};
use super::text::{error, share, three_digits};
use crate::experiment::components::ComponentRow;
use crate::report::table;

const NAME: &str = "components";
const COLUMNS: &str = "settings, component, dense_tail, layer, tokens, density, mse, mae, rel_l1, cosine, selection_seconds, \
                       attention_seconds, dense_seconds, speed_up";

impl LayerRow for ComponentRow {
    fn method(&self) -> &str {
        &self.settings
    }

    fn setting(&self) -> String {
        format!("`{}` of {} with a dense tail of {}", self.component, self.settings, self.dense_tail)
    }

    fn layer(&self) -> usize {
        self.layer
    }

    fn tokens(&self) -> usize {
        self.tokens
    }
}

/// The section for the rows in `directory`. A handful of numbers needs no picture.
pub fn section(directory: &Path) -> Result<Section> {
    let rows = read::<ComponentRow>(directory, NAME, COLUMNS)?;
    let mut text = "Means over the layers; the dense tail in queries, speed-up over our dense attention.\n".to_owned();
    for length in by_length(&rows)? {
        text.push_str(&format!("\n{}:\n\n", length.heading()));
        push_parts(&mut text, &length.settings);
    }
    Ok(Section { directory: directory.to_owned(), pictures: Vec::new(), text, provenance: Provenance::of(&rows) })
}

fn push_parts(text: &mut String, settings: &[Setting<ComponentRow>]) {
    let header = ["settings", "dense tail", "component", "density", "MSE", "relative L1", "speed-up"];
    let line = |own: &Setting<ComponentRow>| {
        let ComponentRow { settings, component, dense_tail, .. } = own.row();
        let seconds = own.mean(|row| row.selection_seconds + row.attention_seconds);
        vec![
            settings.clone(),
            dense_tail.to_string(),
            component.clone(),
            share(own.mean(|row| row.density), 3),
            error(own.mean(|row| row.mse)),
            share(own.mean(|row| row.rel_l1), 4),
            three_digits(own.mean(|row| row.dense_seconds) / seconds),
        ]
    };
    table(text, &header.map(str::to_owned), settings.iter().map(line));
}
