//! `time-split`: time for selection and attention, density and error of each method, from the experiment `time-split`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::time_split::TimeRow;
use s2o_eval::method::DENSE;
use s2o_eval::report::table;

use crate::layers::{Length, Setting, by_length, layer_row, read};
use crate::phases;
use crate::section::{Picture, Section, Sources};
use crate::text::{error, share, three_digits};

const NAME: &str = "time-split";
const COLUMNS: &str = "method, layer, tokens, selection_seconds, attention_seconds, dense_seconds, speed_up, density, \
                       mse, rel_l1";

layer_row!(TimeRow, method, |row| format!("`{}`", row.method));

/// Means of a method, in milliseconds.
struct Times {
    selection: f64,
    attention: f64,
    dense: f64,
}

pub fn section(directory: &Path) -> Result<Section> {
    let rows = read::<TimeRow>(directory, NAME, COLUMNS)?;
    let lengths = by_length(&rows)?;
    let mut text =
        "Times in milliseconds, means over the layers; speed-up is that over our dense attention.\n".to_owned();
    for length in &lengths {
        text.push_str(&format!("\n{}:\n\n{}", length.heading(), table_of(length)));
    }
    let pictures = lengths.iter().map(picture).collect::<Result<_>>()?;
    Ok(Section { directory: directory.to_owned(), pictures, text, sources: Sources::of(&rows) })
}

fn times(own: &Setting<TimeRow>) -> Times {
    let milliseconds = |of: fn(&TimeRow) -> f64| 1e3 * own.mean(of);
    Times {
        selection: milliseconds(|row| row.selection_seconds),
        attention: milliseconds(|row| row.attention_seconds),
        dense: milliseconds(|row| row.dense_seconds),
    }
}

/// Time of dense attention, measured with the last method, unless dense is one of the methods.
fn dense(length: &Length<TimeRow>) -> Option<f64> {
    let is_method = length.settings.iter().any(|own| own.row().method == DENSE);
    length.settings.last().filter(|_| !is_method).map(|own| times(own).dense)
}

fn picture(length: &Length<TimeRow>) -> Result<Picture> {
    let bar = |own: &Setting<TimeRow>| (times(own).selection, times(own).attention);
    let bars = length.settings.iter().map(|own| (own.row().method.as_str(), <[f64; 2]>::from(bar(own))));
    phases::picture(NAME, length.tokens, bars.chain(dense(length).map(|ms| (DENSE, [0.0, ms]))))
}

fn table_of(length: &Length<TimeRow>) -> String {
    let header = ["method", "selection", "attention", "whole", "density", "MSE", "relative L1", "speed-up"];
    let line = |own: &Setting<TimeRow>| {
        let Times { selection, attention, dense } = times(own);
        let whole = selection + attention;
        vec![
            own.row().method.clone(),
            three_digits(selection),
            three_digits(attention),
            three_digits(whole),
            share(own.mean(|row| row.density), 3),
            error(own.mean(|row| row.mse)),
            share(own.mean(|row| row.rel_l1), 4),
            three_digits(dense / whole),
        ]
    };
    let exact = dense(length).map(|ms| {
        let cells = [DENSE, "-", "-", &three_digits(ms), "1.000", "-", "-", "1"];
        cells.map(str::to_owned).to_vec()
    });
    table(&header, length.settings.iter().map(line).chain(exact))
}
