//! Attention probabilities in the order of a panel, pooled to the cells of a picture, and the computed share of the
//! mass.

use std::ops::Range;

use candle_core::Result;
use clap::ValueEnum;
use rayon::prelude::*;
use s2o_plot::{AttentionMap, Matrix, PlotError, Tile};

use super::head::Head;
use super::panel::{Band, Panel};

/// Number of queries whose probabilities are in memory at a time.
const QUERIES: usize = 128;

/// Pooling of the probabilities in a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pool {
    /// The largest, which keeps single keys visible
    Max,
    /// The mean
    Mean,
}

impl Pool {
    pub fn name(self) -> &'static str {
        match self {
            Self::Max => "max",
            Self::Mean => "mean",
        }
    }
}

#[derive(Debug)]
pub struct Pooled {
    how: Pool,
    rows: usize,
    columns: usize,
    /// Maximum or sum of the probabilities in each cell, and their number.
    cells: Vec<(f64, u32)>,
    /// Computed share of the softmax mass, as a mean over the queries.
    pub mass: f64,
}

/// The cells of all panels, at most `cells` in each direction.
pub fn pool(head: &Head, panels: &[Panel], cells: usize, how: Pool) -> Result<Vec<Pooled>> {
    let (rows, columns) = (cells.min(head.q_len()), cells.min(head.k_len()));
    let empty = || Pooled { how, rows, columns, cells: vec![(0.0, 0); rows * columns], mass: 0.0 };
    let mut pooled: Vec<Pooled> = panels.iter().map(|_| empty()).collect();
    for start in (0..head.q_len()).step_by(QUERIES) {
        let queries = start..(start + QUERIES).min(head.q_len());
        let probabilities = head.probabilities(queries.clone())?;
        pooled.par_iter_mut().zip(panels).for_each(|(pooled, panel)| {
            for (query, row) in queries.clone().zip(&probabilities) {
                pooled.add(head, panel, query, row);
            }
        });
    }
    Ok(pooled)
}

impl Pooled {
    fn add(&mut self, head: &Head, panel: &Panel, query: usize, probabilities: &[f32]) {
        let (place, key_places) = (panel.query_places[query], panel.key_places(query));
        // Later keys have no probability.
        let mut placed = vec![None; head.k_len()];
        for (key, &probability) in probabilities.iter().enumerate() {
            placed[key_places.get(key).copied().unwrap_or(key)] = Some(f64::from(probability));
        }

        let row = &mut self.cells[place * self.rows / head.q_len() * self.columns..][..self.columns];
        for (key_place, probability) in placed.iter().enumerate() {
            let Some(probability) = probability else { continue };
            let (pooled, count) = &mut row[key_place * self.columns / head.k_len()];
            match self.how {
                Pool::Max => *pooled = pooled.max(*probability),
                Pool::Mean => *pooled += probability,
            }
            *count += 1;
        }
        let computed = match panel.computed(place) {
            None => placed.iter().flatten().sum::<f64>(),
            Some(ranges) => ranges.iter().flat_map(|keys| &placed[keys.clone()]).flatten().sum(),
        };
        self.mass += computed / head.q_len() as f64;
    }

    pub fn map(&self, head: &Head, panel: &Panel) -> std::result::Result<AttentionMap, PlotError> {
        let tile = |band: &Band, keys: &Range<usize>| Tile { queries: band.queries.clone(), keys: keys.clone() };
        Ok(AttentionMap {
            title: panel.title.to_owned(),
            probabilities: self.matrix()?,
            queries: 0..head.q_len(),
            keys: 0..head.k_len(),
            query_label: panel.query_label.to_owned(),
            key_label: panel.key_label.clone(),
            tiles: panel.bands.iter().flat_map(|band| band.keys.iter().map(move |keys| tile(band, keys))).collect(),
        })
    }

    /// The cells as a matrix: NaN where no query sees a key.
    fn matrix(&self) -> std::result::Result<Matrix, PlotError> {
        let value = |&(pooled, count): &(f64, u32)| match (count, self.how) {
            (0, _) => f64::NAN,
            (_, Pool::Max) => pooled,
            (count, Pool::Mean) => pooled / f64::from(count),
        };
        Matrix::new(self.rows, self.columns, self.cells.iter().map(value).collect())
    }
}
