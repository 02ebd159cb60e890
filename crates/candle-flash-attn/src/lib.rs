//! [`s2o_flash_attn`] under the name that Candle's models and users depend on. One line in the workspace's `Cargo.toml`
//! puts it in the place of the original:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { git = "https://github.com/candle-s2o/candle-s2o" }
//! ```

pub use s2o_flash_attn::*;
