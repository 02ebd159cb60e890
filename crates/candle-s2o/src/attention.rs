//! The interface between models and attention methods: a model calls [`Attention::prefill`] of any method. Methods join
//! the results of a prompt's chunks in a [`ChunkLedger`].

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Tensor};

/// Parameters of one attention call in addition to its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillCall {
    /// Decoder layer, counted from 0.
    pub layer: usize,
    /// Factor on `q . k` before the softmax, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
    /// Length of the whole prompt in tokens, including those in the cache. The call whose keys reach it is the last
    /// chunk. S2O's segment length and dense tail depend on it, so chunks are cut like the whole prompt.
    pub prompt_len: usize,
}

/// A causal prefill attention method.
///
/// Implementations are shared by all layers of a model and may be called from several threads.
pub trait Attention: Debug + Send + Sync {
    /// Short stable name, as printed in tables (`dense`, `s2o`).
    fn name(&self) -> &str;

    /// Causal attention of a prompt chunk, after rotary embedding.
    ///
    /// `q` is `(batch, q_len, num_heads, head_dim)`; `k` and `v` are `(batch, k_len, num_kv_heads, head_dim)` and hold
    /// the whole cache, this chunk included. Returns `(batch, q_len, num_heads, head_dim)`. Queries are the LAST
    /// `q_len` positions of the `k_len` keys (bottom-right causal, as in FlashAttention 2.1 and later). `num_heads` is
    /// a multiple of `num_kv_heads`; query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    ///
    /// # Errors
    /// If the method does not support the shapes, dtypes or devices.
    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;

    /// How many of the last queries of the prompt have outputs that depend on no other query. A caller that needs only
    /// some of these may leave out all other queries: a decoder does so in its last layer. The default is none. A method
    /// that wraps another passes this on, unless it looks at all queries.
    fn independent_queries(&self, _call: &PrefillCall) -> usize {
        0
    }
}

/// Results of the last prompt by layer, joined from its chunks. A chunk that does not begin where the previous chunk
/// ended begins a new prompt, so the ledger does not grow from prompt to prompt.
#[derive(Debug, Default)]
pub struct ChunkLedger<R>(Mutex<BTreeMap<usize, (usize, R)>>);

impl<R: Default> ChunkLedger<R> {
    /// Joins a chunk's result with the previous results, using `join`. `positions` are its positions in the prompt.
    pub fn record(&self, layer: usize, positions: Range<usize>, join: impl FnOnce(&mut R)) {
        let mut layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, joined) = layers.entry(layer).or_default();
        if *end != positions.start {
            *joined = R::default();
        }
        *end = positions.end;
        join(joined);
    }

    /// Removes and returns the results by layer.
    pub fn take(&self) -> BTreeMap<usize, R> {
        let layers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        layers.into_iter().map(|(layer, (_, joined))| (layer, joined)).collect()
    }
}
