//! [`Tile`]: a rectangle of an attention map.

use std::ops::Range;

/// A rectangle of queries and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Its rows.
    pub queries: Range<usize>,
    /// Its columns.
    pub keys: Range<usize>,
}
