//! One Candle decoder for Llama 2, 3, 3.1, 3.2 and Qwen3 whose prefill attention is a plug.
//!
//! Candle's own models decide in the source, or by a build flag, which attention they run, keep caches that are copied
//! on every step, and lack the long-context RoPE scalings. [`Decoder`] takes the attention of its prefill as an argument
//! ([`candle_s2o::Attention`]), so that dense and sparse methods run on the same weights in the same process; it names
//! no method. Decoding stays dense.

mod attention;
pub mod config;
pub mod decoder;
pub mod error;
pub mod kv_cache;
mod llama;
mod qwen3;
mod random;
pub mod rope;
pub mod weights;

pub use config::{Architecture, DecoderConfig};
pub use decoder::{Decoder, PrefillOptions, PrefillOutput};
pub use error::{ModelError, Result};
pub use kv_cache::KvCache;
