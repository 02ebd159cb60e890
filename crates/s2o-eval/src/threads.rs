//! The limit on the threads of a program.

use std::num::NonZeroUsize;

/// Limits every thread pool of the process. The program must call it first, before any other thread exists.
pub fn limit_threads(threads: NonZeroUsize) {
    // Candle has a pool next to Rayon's, and both take their size from the environment when they are first used.
    for variable in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
        // SAFETY: the program calls this before anything else, so no other thread can read the environment.
        unsafe { std::env::set_var(variable, threads.to_string()) };
    }
}
