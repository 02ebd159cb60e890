//! [`TuningCall`]: the input of a search for settings.

use candle_core::Tensor;
use candle_s2o::PrefillCall;

/// One attention call to tune on, as [`candle_s2o::Attention::prefill`] gets it.
#[derive(Debug, Clone)]
pub struct TuningCall {
    /// The call.
    pub call: PrefillCall,
    /// `(batch, q_len, num_heads, head_dim)`.
    pub q: Tensor,
    /// `(batch, k_len, num_kv_heads, head_dim)`.
    pub k: Tensor,
    /// As `k`.
    pub v: Tensor,
}
