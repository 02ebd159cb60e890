//! [`ChunkLedger`]: the results of a prompt's chunks, joined for each layer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

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
