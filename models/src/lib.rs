//! One Candle decoder for Llama 2, 3, 3.1, 3.2 and Qwen3 whose prefill attention is a plug.
//!
//! Candle's own models decide in the source, or by a build flag, which attention they run, keep caches that are copied
//! on every step, and lack the long-context RoPE scalings. [`Decoder`] takes the attention of its prefill as an argument
//! ([`candle_s2o::Attention`]), so that dense and sparse methods run on the same weights in the same process; it names
//! no method. Decoding stays dense.
//!
//! ```no_run
//! # fn run(method: &dyn candle_s2o::Attention) -> s2o_models::Result<()> {
//! use s2o_models::{GenerationOptions, LoadOptions, ModelSource, PrefillOptions, passkey};
//!
//! let model = "needle-7m".parse::<ModelSource>()?.load(&LoadOptions::default(), None)?;
//! let prompt = &passkey::records()?[0];
//! let tokens = model.encode(&prompt.input)?;
//! let mut cache = model.decoder.new_cache(1, tokens.len() + 24)?;
//! let options = GenerationOptions { max_new_tokens: 24, ..Default::default() };
//! let prefill = PrefillOptions::new().chunk(4096);
//! let out = model.generate(&tokens, &mut cache, method, prefill, &options, &mut |text| print!("{text}"))?;
//! assert!(passkey::answers_exactly(&out.text, &prompt.answer));
//! # Ok(())
//! # }
//! ```

mod attention;
pub mod chunk;
pub mod config;
pub mod decoder;
mod device;
pub mod error;
pub mod generation;
pub mod kv_cache;
mod layers;
mod llama;
mod mlp;
pub mod model;
pub mod passkey;
mod qwen3;
mod random;
pub mod rope;
pub mod weights;

pub use chunk::Chunk;
pub use config::{Architecture, DecoderConfig};
pub use decoder::{Decoder, PrefillOptions, PrefillOutput};
pub use device::gpu;
pub use error::{HubFile, ModelError, Result};
pub use generation::{Generated, GenerationOptions, StopReason, TextStream, TokenStream};
pub use kv_cache::KvCache;
pub use model::LoadedModel;
pub use weights::{HubOptions, LoadOptions, ModelSource};
