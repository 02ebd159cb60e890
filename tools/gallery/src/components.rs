//! `components`: the contribution of each part of S2O, from the experiment `components`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::components::ComponentRow;
use s2o_eval::report::table;

use crate::layers::{Setting, by_length, layer_row, read};
use crate::section::{Section, Sources};
use crate::text::{error, share, three_digits};

const NAME: &str = "components";
const COLUMNS: &str = "settings, component, dense_tail, layer, tokens, density, mse, mae, rel_l1, cosine, \
                       selection_seconds, attention_seconds, dense_seconds, speed_up";

layer_row!(ComponentRow, settings, |row| {
    format!("`{}` of {} with a dense tail of {}", row.component, row.settings, row.dense_tail)
});

/// A few numbers need no picture.
pub fn section(directory: &Path) -> Result<Section> {
    let rows = read::<ComponentRow>(directory, NAME, COLUMNS)?;
    let mut text = "Means over the layers; the dense tail in queries, speed-up over our dense attention.\n".to_owned();
    for length in by_length(&rows)? {
        text.push_str(&format!("\n{}:\n\n{}", length.heading(), parts(&length.settings)));
    }
    Ok(Section { directory: directory.to_owned(), pictures: Vec::new(), text, sources: Sources::of(&rows) })
}

fn parts(settings: &[Setting<ComponentRow>]) -> String {
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
    table(&header, settings.iter().map(line))
}
