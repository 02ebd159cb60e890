//! Tests of every stage against an independent program's vectors, and of the fast path against our own reference.

mod blocks;
mod cpu;
mod error_control;
mod invariants;
mod probes;
mod random;
mod vectors;
