//! Re-exports [`s2o_flash_attn`] under the name that Candle's models and users depend on. These lines in the
//! workspace's `Cargo.toml` replace the original crate:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { path = "../candle-s2o/crates/candle-flash-attn" }
//! ```

pub use s2o_flash_attn::*;
