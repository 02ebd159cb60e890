//! Tables of outcomes: accuracy and density by task, length and method.
//!
//! [`rows`] combines outcomes, [`write_csv`] and [`markdown`] write tables, and [`depth_grids`] has scores by depth and
//! length. [`NiahResult`] and [`RulerPrediction`] are the file formats of other projects' scripts.

mod aggregate;
mod columns;
mod depth_grid;
mod export;
mod interval;
mod markdown;
#[cfg(test)]
mod tests;

pub use aggregate::{RULER_AVERAGE, Row, rows, write_csv};
pub use columns::{CHANGED, Column, accuracy, answer_columns, naming_columns, perplexity_columns};
pub use depth_grid::{DepthGrid, depth_grids};
pub use export::{NiahResult, RulerPrediction};
pub use interval::wilson;
pub use markdown::{markdown, pivot_table, rows_of_models, table};
