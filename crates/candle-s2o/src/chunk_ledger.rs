//! [`ChunkLedger`]: what the chunks of a prompt add up to, layer by layer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Results of the last prompt by layer, joined from its chunks. A chunk that does not begin where the one before ended
/// begins a new prompt, so the ledger does not grow from prompt to prompt.
#[derive(Debug, Default)]
pub struct ChunkLedger<R>(Mutex<BTreeMap<usize, (usize, R)>>);

impl<R: Default> ChunkLedger<R> {
    /// Joins the result of a chunk with those before it, by `join`. `positions` are the chunk's in the prompt.
    pub fn record(&self, layer: usize, positions: Range<usize>, join: impl FnOnce(&mut R)) {
        let mut layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, joined) = layers.entry(layer).or_default();
        if *end != positions.start {
            *joined = R::default();
        }
        *end = positions.end;
        join(joined);
    }

    /// Takes the results, by layer.
    pub fn take(&self) -> BTreeMap<usize, R> {
        let layers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        layers.into_iter().map(|(layer, (_, joined))| (layer, joined)).collect()
    }
}
