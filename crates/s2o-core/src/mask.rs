//! [`Mask`]: the keys that a query may attend to.

/// The keys that a query may attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// The keys up to its own position, where the queries are the last positions (bottom-right causal).
    Causal,
    /// All keys.
    Full,
}

impl Mask {
    /// Whether later keys are hidden.
    pub fn is_causal(self) -> bool {
        self == Self::Causal
    }
}
