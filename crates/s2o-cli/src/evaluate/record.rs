//! Rows of experiments: as CSV with their provenance, as JSON, and as a table.

use std::fs::{self, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use comfy_table::Table;
use s2o_eval::Provenance;
use serde::Serialize;

use crate::layout::{Look, scientific, seconds};
use crate::machine;
use crate::writable::cannot_write;

/// The provenance of rows that this run makes from tensors that `source` describes.
pub fn here(source: &str, device: &Device) -> Provenance {
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    Provenance::here(machine::name(device), command).with_source(source)
}

/// Appends rows to `<directory>/<name>.csv`.
pub fn append<R: Serialize>(directory: &Path, name: &str, rows: &[R], origin: &Provenance) -> Result<()> {
    let path = directory.join(format!("{name}.csv"));
    let describe = || cannot_write(&path);
    fs::create_dir_all(directory).with_context(describe)?;
    let Some(first) = rows.first() else { return Ok(()) };
    let header = format!("{},{}", header_of(first)?, header_of(origin)?);
    let before = match path.exists() {
        true => fs::read_to_string(&path).with_context(describe)?,
        false => String::new(),
    };
    if let Some(got) = before.lines().next() {
        ensure!(got == header, "{}: expected the columns {header}, got {got}", path.display());
    }
    let file = OpenOptions::new().create(true).append(true).open(&path).with_context(describe)?;
    let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(file);
    if before.is_empty() {
        writer.write_record(header.split(','))?;
    }
    for row in rows {
        writer.serialize((row, origin))?;
    }
    writer.flush().with_context(describe)
}

pub fn json_lines<R: Serialize>(rows: &[R]) -> Result<String> {
    let lines = rows.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(lines.into_iter().map(|line| line + "\n").collect())
}

/// The rows as a table. The name of a column decides its number format.
pub fn table<R: Serialize>(rows: &[R], look: Look) -> Result<Table> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    rows.iter().try_for_each(|row| writer.serialize(row))?;
    let text = writer.into_inner().context("laying out the rows")?;
    let mut reader = csv::Reader::from_reader(text.as_slice());
    let names: Vec<String> = reader.headers()?.iter().map(str::to_owned).collect();
    let mut table = look.table(names.iter().map(|name| name.trim_end_matches("_seconds")));
    for record in reader.records() {
        table.add_row(names.iter().zip(&record?).map(|(name, value)| shown(name, value)));
    }
    Ok(table)
}

fn shown(column: &str, value: &str) -> String {
    let Ok(number) = value.parse::<f64>() else {
        return if value.is_empty() { "-".to_owned() } else { value.to_owned() };
    };
    match column {
        "mse" | "mae" | "rel_l1" | "head_rel_l1" => scientific(number),
        "density" | "block_density" | "mean_tau" | "mean_theta" => format!("{number:.3}"),
        "cosine" => format!("{number:.6}"),
        "speed_up" | "ratio" => format!("{number:.2}x"),
        name if name.ends_with("seconds") => seconds(number),
        _ => value.to_owned(),
    }
}

fn header_of<R: Serialize>(row: &R) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.serialize(row)?;
    let text = String::from_utf8(writer.into_inner().context("laying out a row")?)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
