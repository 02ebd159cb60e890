//! One Candle decoder for Llama 2, 3, 3.1, 3.2 and Qwen3 whose prefill attention is an argument.
//!
//! Candle's own models fix their attention in the source or with a build flag, copy their caches on every step, and
//! lack the long-context RoPE scalings. [`Decoder::prefill`] takes the attention as an argument
//! ([`candle_s2o::Attention`]), so that dense and sparse methods run on the same weights in the same process. Decoding
//! is dense.
//!
//! Models come from files, from the Hugging Face hub (feature `hub`, on by default), or from this library itself
//! ([`ModelSource`]).
//!
//! ```no_run
//! # fn run(method: &dyn candle_s2o::Attention) -> s2o_models::Result<()> {
//! use s2o_models::{GenerationOptions, LoadOptions, ModelSource, PrefillOptions, passkey};
//!
//! let model = "needle-11m".parse::<ModelSource>()?.load(&LoadOptions::default(), None)?;
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
mod device_memory;
pub mod error;
pub mod fused;
pub mod generation;
mod head_tiles;
#[cfg(any(test, feature = "cuda"))]
mod host_memory;
pub mod kv_cache;
mod layers;
mod matrix;
pub mod model;
pub mod parallel;
pub mod passkey;
pub mod prefill;
mod random;
pub mod rope;
mod sampling;
mod text_stream;
pub mod weights;

pub use attention::decode_attn;
pub use chunk::Chunk;
pub use config::{Architecture, DecoderConfig};
pub use decoder::{Decoder, DecoderOptions};
pub use device::gpu;
#[cfg(feature = "cuda")]
pub use device::gpu_count;
pub use device_memory::{DeviceMemory, is_out_of_memory};
pub use error::{HubFile, ModelError, Result};

pub use fused::LinearPrecision;
pub use generation::{Generated, GenerationOptions, StopReason, TokenStream};
pub use head_tiles::HeadTiles;
pub use kv_cache::{KvCache, KvStorage};
pub use model::LoadedModel;
pub use parallel::Parallel;
pub use prefill::{PrefillOptions, PrefillOutput};
pub use text_stream::TextStream;
pub use weights::{HubOptions, LoadOptions, ModelSource};
