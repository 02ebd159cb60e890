//! [`Matrix`]: the numbers of a heatmap.

use super::error::PlotError;

/// Numbers in rows and columns. NaN stands for a cell without a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// `values` row by row.
    ///
    /// # Errors
    /// [`PlotError::Count`] if there are not `rows * columns` values.
    pub fn new(rows: usize, columns: usize, values: Vec<f64>) -> Result<Self, PlotError> {
        let expected = rows.saturating_mul(columns);
        if values.len() != expected {
            return Err(PlotError::Count { what: "values of the matrix", expected, got: values.len() });
        }
        Ok(Self { rows, columns, values })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values, row by row.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The values of one row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[f64] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.values[row * self.columns..][..self.columns]
    }
}
