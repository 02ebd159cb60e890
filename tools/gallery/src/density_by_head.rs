//! `density-by-head`: the density of each head of each layer, from the experiment `heads`.

use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::heads::HeadRow;
use s2o_eval::report::table;
use s2o_plot::{Heatmap, Matrix, Scale};

use crate::rows::{distinct, newest_runs, of_experiment};
use crate::section::{Picture, Section, Sources};
use crate::text::{share, slug};

pub fn section(directory: &Path) -> Result<Section> {
    let rows = of_experiment::<HeadRow>(directory, "heads", "method, layer, head, tokens, density")?;
    let rows = newest_runs(rows, |row| row.method.clone());
    let sources = Sources::of(&rows);
    let rows: Vec<HeadRow> = rows.into_iter().map(|row| row.row).collect();
    let methods = distinct(rows.iter().map(|row| row.method.as_str()));
    let mut layers = distinct(rows.iter().map(|row| row.layer));
    layers.sort_unstable();
    let picture = |method: &&str| {
        let name = format!("density-by-head-{}", slug(method));
        let description = format!("Density by layer and head: {method}");
        Picture::new(name, description, (800, 600), map(method, &layers, &rows)?)
    };
    let pictures = methods.iter().map(picture).collect::<Result<_>>()?;
    let text = format!("Mean density over the heads of each layer.\n\n{}", means(&methods, &layers, &rows));
    Ok(Section { directory: directory.to_owned(), pictures, text, sources })
}

/// Layers as rows, heads as columns.
fn map(method: &str, layers: &[usize], rows: &[HeadRow]) -> Result<Heatmap> {
    let own: Vec<&HeadRow> = rows.iter().filter(|row| row.method == method).collect();
    let mut heads = distinct(own.iter().map(|row| row.head));
    heads.sort_unstable();
    let density = |layer: usize, head: usize| {
        // The last row counts: a run may have been repeated.
        let row = own.iter().rev().find(|row| (row.layer, row.head) == (layer, head));
        row.map_or(f64::NAN, |row| row.density)
    };
    let values = layers.iter().flat_map(|&layer| heads.iter().map(move |&head| density(layer, head)));
    Ok(Heatmap {
        title: method.to_owned(),
        values: Matrix::new(layers.len(), heads.len(), values.collect())?,
        row_labels: layers.iter().map(ToString::to_string).collect(),
        column_labels: heads.iter().map(ToString::to_string).collect(),
        rows: "layer".to_owned(),
        columns: "query head".to_owned(),
        unit: "density".to_owned(),
        scale: Scale::Linear,
        range: Some((0.0, 1.0)),
        decimals: 2,
    })
}

fn means(methods: &[&str], layers: &[usize], rows: &[HeadRow]) -> String {
    let mean = |method: &str, layer: Option<usize>| {
        let is_own = |row: &&HeadRow| row.method == method && layer.is_none_or(|layer| row.layer == layer);
        let (sum, count) =
            rows.iter().filter(is_own).fold((0.0, 0), |(sum, count), row| (sum + row.density, count + 1));
        if count > 0 { share(sum / f64::from(count), 3) } else { "-".to_owned() }
    };
    let line = |name: String, layer: Option<usize>| {
        [name].into_iter().chain(methods.iter().map(|method| mean(method, layer))).collect()
    };
    let header = [&["layer"], methods].concat();
    let of_layers = layers.iter().map(|&layer| line(layer.to_string(), Some(layer)));
    table(&header, of_layers.chain([line("all".to_owned(), None)]))
}
