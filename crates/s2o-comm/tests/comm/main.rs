//! Ranks as threads, and where it matters as processes, over 127.0.0.1.

mod collectives;
mod liveness;
mod messages;
mod rendezvous;
