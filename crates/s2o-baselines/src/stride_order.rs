//! [`StrideOrder`]: the order of the tokens inside a stride.

/// Order of the tokens inside a stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrideOrder {
    /// Ascending position.
    Forward,
    /// The last token first.
    Backward,
}
