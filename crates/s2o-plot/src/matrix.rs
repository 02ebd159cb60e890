//! [`Matrix`]: the numbers of a heatmap.

use super::error::PlotError;

/// Numbers in rows and columns. NaN is a cell without a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// A matrix of `values`, row by row.
    ///
    /// # Errors
    /// [`PlotError::WrongInput`] if there are not `rows * columns` values.
    pub fn new(rows: usize, columns: usize, values: Vec<f64>) -> Result<Self, PlotError> {
        let expected = rows.saturating_mul(columns);
        if values.len() != expected {
            return Err(PlotError::wrong("values of the matrix", expected, values.len()));
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
}
