//! Tables of outcomes: accuracy and density by task, length and method.
//!
//! [`rows`] combines outcomes, [`write_csv`] and [`markdown`] write tables, and [`depth_grids`] has scores by depth and
//! length. [`comparisons`] compares methods with exact attention. [`niah_result`] and [`ruler_prediction`] are in the
//! formats of other projects' scripts.

mod aggregate;
mod columns;
mod comparison;
mod depth_grid;
mod export;
mod markdown;
#[cfg(test)]
mod tests;
mod text;

pub use aggregate::{RULER_AVERAGE, Row, ascending, distinct, grouped, rows, unpaired, write_csv};
pub use columns::{CHANGED, Column, answer_columns, naming_columns, perplexity_columns};
pub use comparison::{ALL_TASKS, Comparison, DifferingItem, comparisons, differing_items, paired_interval};
pub use depth_grid::{DepthGrid, depth_grids};
pub use export::{niah_result, ruler_prediction};
pub use markdown::{markdown, rows_of_models, task_tables};
pub use text::{inline, pivot, plain, table};
