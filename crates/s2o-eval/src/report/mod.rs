//! Tables of outcomes: accuracy and density by task, length and method.
//!
//! [`rows`] adds up, [`write_csv`] and [`markdown`] write; [`depth_grids`] has scores by depth and length. The exports
//! are the files that the scripts of other projects read: [`NiahResult`] and [`RulerPrediction`].

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
