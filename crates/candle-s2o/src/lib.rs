//! S2O sparse attention for Candle.

mod attention;

pub use attention::{Attention, PrefillCall};
