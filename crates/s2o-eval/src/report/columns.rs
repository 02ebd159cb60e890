//! [`Column`]: the columns of tables of rows, in Markdown and on a terminal.

use super::aggregate::Row;

/// A column of a table of rows.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// The cell of a row; empty if the row lacks the value.
    pub cell: fn(&Row) -> String,
}

const TASK: Column = Column { name: "task", cell: |row| row.task.clone() };
const CONTEXT: Column = Column { name: "context", cell: |row| row.context_tokens.to_string() };
const METHOD: Column = Column { name: "method", cell: |row| row.method.clone() };
const CHUNK: Column = Column { name: "chunk", cell: |row| row.chunk.clone() };
/// The columns of the setting, shown if they differ.
const SETTING: [Column; 4] = [
    Column { name: "model", cell: |row| row.model.clone() },
    Column { name: "dtype", cell: |row| row.dtype.clone() },
    Column { name: "device", cell: |row| row.device.clone() },
    Column { name: "template", cell: |row| row.template.clone() },
];
const ITEMS: Column = Column { name: "items", cell: |row| row.items.to_string() };
pub(super) const ACCURACY: Column = Column { name: "accuracy", cell: |row| row.score.map(percent).unwrap_or_default() };
const STRICT: Column = Column { name: "strict", cell: |row| row.strict_score.map(percent).unwrap_or_default() };
const INTERVAL: Column = Column { name: "95 %", cell: interval };
const PERPLEXITY: Column = Column { name: "perplexity", cell: |row| decimals(row.perplexity) };
const TOP1_AGREES: Column = Column { name: "top-1 agrees", cell: |row| decimals(row.top1_agreement) };

pub(super) const DENSITY: Column = Column { name: "density", cell: |row| decimals(Some(row.density)) };

/// Number of answers that differ from those with the first chunk size.
pub const CHANGED: Column =
    Column { name: "changed", cell: |row| row.changed_by_chunks.map(|count| count.to_string()).unwrap_or_default() };

/// The columns that identify a row: task, length and method; model, precision, device, template and chunk size if there
/// are several.
pub fn naming_columns(rows: &[&Row]) -> Vec<Column> {
    let are_several = |column: &Column| rows.iter().any(|row| (column.cell)(row) != (column.cell)(rows[0]));
    let mut columns = vec![TASK, CONTEXT];
    columns.extend(SETTING.into_iter().filter(are_several));
    columns.push(METHOD);
    columns.extend(Some(CHUNK).filter(are_several));
    columns
}

/// The columns of answers, in percent.
pub fn answer_columns() -> [Column; 5] {
    [ITEMS, ACCURACY, INTERVAL, STRICT, DENSITY]
}

/// The columns of passages.
pub fn perplexity_columns() -> [Column; 3] {
    [PERPLEXITY, DENSITY, TOP1_AGREES]
}

/// The columns of a table of one model's passages.
pub(super) fn passage_columns() -> Vec<Column> {
    [Column { name: "text", ..TASK }, CONTEXT, METHOD, CHUNK].into_iter().chain(perplexity_columns()).collect()
}

fn interval(row: &Row) -> String {
    let interval = row.score_low.zip(row.score_high);
    interval.map(|(low, high)| format!("{} to {}", percent(low), percent(high))).unwrap_or_default()
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

fn decimals(value: Option<f64>) -> String {
    value.map(|value| format!("{value:.3}")).unwrap_or_default()
}
