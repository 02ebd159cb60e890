//! Published sparse prefill methods, to compare S2O with.
