//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.

pub mod plot;
