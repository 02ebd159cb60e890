//! [`s2o_flash_attn`] under the name that Candle's models and users depend on. One line in the workspace's `Cargo.toml`
//! puts it in the place of the original:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { path = "../candle-s2o/crates/candle-flash-attn" }
//! ```

pub use s2o_flash_attn::*;
