//! Every stage against an independent program's vectors, and the fast path against our own reference.

mod reference;
mod vectors;
