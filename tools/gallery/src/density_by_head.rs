//! `density-by-head`: the density of each head of each layer, from the experiment `heads`.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use s2o_eval::experiment::heads::HeadRow;
use s2o_plot::{Heatmap, Matrix, Scale};

use crate::rows::{Sourced, ascending, distinct, newest_runs, of_experiment};
use crate::section::Section;
use crate::text::{pivot, share, slug};

pub fn section(directory: &Path) -> Result<Section> {
    let rows = of_experiment::<HeadRow>(directory, "heads", "method, layer, head, tokens, density")?;
    let rows = newest_runs(rows, |row| row.method.clone());
    let methods = distinct(rows.iter().map(|row| row.method.as_str()));
    let layers = ascending(rows.iter().map(|row| row.layer));
    let mut section = Section::new(directory);
    section.cite(&rows);
    for method in &methods {
        let name = format!("density-by-head-{}", slug(method));
        let description = format!("Density by layer and head: {method}");
        section.draw(name, description, (800, 600), map(method, &layers, &rows)?)?;
    }

    let of_layers = layers.iter().map(|&layer| (vec![layer.to_string()], Some(layer)));
    let columns: Vec<_> = methods.iter().map(|&method| (method.to_owned(), method)).collect();
    let means = pivot(&["layer"], &columns, of_layers.chain([(vec!["all".to_owned()], None)]), |layer, method| {
        let own = rows.iter().filter(|row| row.method == *method && layer.is_none_or(|layer| row.layer == layer));
        let (sum, count) = own.fold((0.0, 0), |(sum, count), row| (sum + row.density, count + 1));
        (count > 0).then(|| share(sum / f64::from(count), 3))
    });
    section.text = format!("Mean density over the heads of each layer.\n\n{means}");
    Ok(section)
}

/// Layers as rows, heads as columns.
fn map(method: &str, layers: &[usize], rows: &[Sourced<HeadRow>]) -> Result<Heatmap> {
    let own = rows.iter().filter(|row| row.method == method);
    // The last row counts: a run may have been repeated.
    let density: HashMap<_, f64> = own.map(|row| ((row.layer, row.head), row.density)).collect();
    let heads = ascending(density.keys().map(|(_, head)| *head));
    let cells = layers.iter().flat_map(|&layer| heads.iter().map(move |&head| (layer, head)));
    let values = cells.map(|cell| density.get(&cell).copied().unwrap_or(f64::NAN)).collect();
    Ok(Heatmap {
        title: method.to_owned(),
        values: Matrix::new(layers.len(), heads.len(), values)?,
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
