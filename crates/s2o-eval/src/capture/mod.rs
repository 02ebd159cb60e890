//! Queries, keys and values to run attention methods on: captured in a model's prefill, or read from a file.

mod file;
mod prefill;

use candle_core::{Result, Tensor};
use candle_s2o::{AttnShape, PrefillCall};

use crate::method::shape_of;

pub use file::{TensorFile, save_layers, save_tensors, tensor_name};
pub use prefill::capture;

/// The operands of one attention call.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// The decoder layer that they come from.
    pub layer: usize,
    /// (batch, q_len, num_heads, head_dim)
    pub q: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub v: Tensor,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
}

impl LayerTensors {
    /// The parameters of the call. The prompt has as many tokens as `k`.
    ///
    /// # Errors
    /// If `k` has no length dimension.
    pub fn call(&self) -> Result<PrefillCall> {
        Ok(PrefillCall { layer: self.layer, softmax_scale: self.softmax_scale, prompt_len: self.k.dim(1)? })
    }

    /// The checked sizes.
    ///
    /// # Errors
    /// If the shapes of the tensors do not match.
    pub fn shape(&self) -> Result<AttnShape> {
        shape_of(&self.q, &self.k, &self.v)
    }
}
