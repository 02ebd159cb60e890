//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.

pub mod error;
pub mod score;

pub use error::{EvalError, Result};
