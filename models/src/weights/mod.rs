//! Where weights come from: safetensors, GGUF, the hub, the embedded model, or a seed.

pub mod synthetic;
