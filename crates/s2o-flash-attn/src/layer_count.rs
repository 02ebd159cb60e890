//! Determines the layer of a call by counting prefill calls, because callers do not pass the layer.
//!
//! A pass of a model over a chunk of its prompt makes one call per layer, one after another on one thread, with the
//! same lengths. Calls are therefore counted per thread, modulo the number of layers. A sequence of calls that a pass
//! cannot make is an error. It ends the model's forward pass, and the next pass begins with layer 0.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::FlashAttnError;

/// Changes with the policy, which invalidates the counts under earlier policies.
static GENERATION: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static PASS: Cell<Pass> = const { Cell::new(Pass { generation: 0, next: 0, lengths: None }) };
}

/// The count of one thread.
#[derive(Debug, Clone, Copy)]
struct Pass {
    generation: u64,
    /// The layer of the next prefill call.
    next: usize,
    /// Sequences, queries and keys of the last prefill call; `None` if single queries followed.
    lengths: Option<[usize; 3]>,
}

impl Pass {
    fn fresh() -> Self {
        Self { generation: GENERATION.load(Ordering::Relaxed), next: 0, lengths: None }
    }

    fn of_this_thread() -> Self {
        let fresh = Self::fresh();
        let pass = PASS.get();
        if pass.generation == fresh.generation { pass } else { fresh }
    }
}

/// The layer of a prefill call with lengths `[batch, q_len, k_len]`, for a model with `num_layers` layers.
pub(crate) fn next_layer(num_layers: usize, lengths: [usize; 3]) -> Result<usize, FlashAttnError> {
    let pass = Pass::of_this_thread();
    let layer = pass.next;
    match pass.lengths {
        Some(before) if layer > 0 && before != lengths => {
            return refuse(num_layers, layer, format!("{} as in layer 0", words(before)), words(lengths));
        }
        // The same whole prompt may follow. The same chunk may not, because its keys are already in the cache.
        Some(before) if layer == 0 && before == lengths && lengths[2] > lengths[1] => {
            return refuse(num_layers, layer, "another chunk".to_owned(), format!("{} again", words(lengths)));
        }
        _ => {}
    }
    PASS.set(Pass { next: (layer + 1) % num_layers, lengths: Some(lengths), ..pass });
    Ok(layer)
}

/// Counts a call with a single query: a new token, which a model computes after its passes over the prompt.
/// `num_layers` is needed for the error.
pub(crate) fn single_query(num_layers: usize) -> Result<(), FlashAttnError> {
    let pass = Pass::of_this_thread();
    if pass.next > 0 {
        let expected = "a prefill call of that layer".to_owned();
        return refuse(num_layers, pass.next, expected, "a call with one query".to_owned());
    }
    PASS.set(Pass { lengths: None, ..pass });
    Ok(())
}

/// Restarts the count of this thread: its next prefill call belongs to layer 0.
pub(crate) fn restart() {
    PASS.set(Pass::fresh());
}

/// Restarts the counts of all threads, after a change of the policy.
pub(crate) fn restart_all() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn refuse<T>(num_layers: usize, layer: usize, expected: String, got: String) -> Result<T, FlashAttnError> {
    restart();
    Err(FlashAttnError::LayerCount { num_layers, layer, expected, got })
}

fn words([batch, q_len, k_len]: [usize; 3]) -> String {
    format!("{q_len} queries of {k_len} keys in {batch} sequences")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(num_layers: usize, calls: &[[usize; 3]]) -> Vec<usize> {
        calls.iter().map(|&lengths| next_layer(num_layers, lengths).unwrap()).collect()
    }

    #[test]
    fn passes_are_counted_from_layer_0() {
        restart();
        // Two chunks, a new token, the same whole prompt twice.
        let chunks = [[1, 64, 64], [1, 64, 64], [1, 64, 128], [1, 64, 128]];
        assert_eq!(layers(2, &chunks), [0, 1, 0, 1]);
        single_query(2).unwrap();
        // Another prompt, of which the cache holds the first 64 tokens.
        assert_eq!(layers(2, &[[1, 64, 128]; 2]), [0, 1]);
        assert_eq!(layers(2, &[[1, 80, 80]; 4]), [0, 1, 0, 1]);
    }

    #[test]
    fn a_pass_with_too_few_calls_is_an_error_and_the_next_counts_anew() {
        restart();
        // A model with two layers and settings for three.
        assert_eq!(layers(3, &[[1, 64, 64]; 2]), [0, 1]);
        let error = single_query(3).unwrap_err().to_string();
        assert!(error.contains("expected a prefill call of that layer, got a call with one query"), "{error}");
        assert_eq!(layers(3, &[[1, 64, 64]; 2]), [0, 1]);
        let error = next_layer(3, [1, 80, 80]).unwrap_err().to_string();
        assert!(error.contains("64 queries of 64 keys") && error.contains("80 queries of 80 keys"), "{error}");
        assert_eq!(layers(3, &[[1, 80, 80]; 3]), [0, 1, 2]);
    }

    #[test]
    fn a_chunk_that_comes_twice_is_an_error() {
        restart();
        // A model with four layers and settings for two: for a whole prompt this looks like a second prompt.
        assert_eq!(layers(2, &[[1, 64, 64]; 4]), [0, 1, 0, 1]);
        assert_eq!(layers(2, &[[1, 64, 128]; 2]), [0, 1]);
        let error = next_layer(2, [1, 64, 128]).unwrap_err().to_string();
        assert!(error.contains("expected another chunk, got 64 queries of 128 keys in 1 sequences again"), "{error}");
    }

    #[test]
    fn threads_count_apart() {
        restart();
        assert_eq!(next_layer(2, [1, 64, 64]).unwrap(), 0);
        assert_eq!(std::thread::spawn(|| next_layer(2, [1, 32, 32]).unwrap()).join().unwrap(), 0);
        assert_eq!(next_layer(2, [1, 64, 64]).unwrap(), 1);
    }
}
