//! The decoder against Candle's own models, its chunking and caching, every weight format, and bad input.

mod bad_input;
mod conformance;
mod fixtures;
mod gguf;
mod hub;
mod hub_cache;
mod int8_cache;
mod last_layer;
mod needle;
mod parallel;
mod prefill;
mod rope;
mod sampling;
mod smollm2;
mod synthetic;
